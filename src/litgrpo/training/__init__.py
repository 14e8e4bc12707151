"""From rollouts to optimizer steps."""
