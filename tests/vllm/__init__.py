"""Tests against a real vLLM server, in an environment of its own; see `.ci/vllm`."""
