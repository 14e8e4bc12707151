"""Tests against a real vLLM server, in a separate environment; see `.ci/nightly vllm`."""
