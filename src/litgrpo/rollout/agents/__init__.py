"""Rollouts of agents that call the policy through the OpenAI API."""
