"""Who said what: engines that turn weights, prompts and uniforms into completions."""
