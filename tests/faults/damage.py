"""Twelve ways in which a checkpoint is not the one that was written, or not this run's."""

from collections.abc import Callable

import torch

from litgrpo.checkpointing.files import MANIFEST, build_manifest
from tests.faults.running import Run, merge_runs


def newest(run: Run):
    return run.checkpoints / (run.checkpoints / "last.ckpt").readlink()


def cut_to(share: float) -> Callable[[Run], None]:
    """Keep the first part of the file."""

    def change(run: Run) -> None:
        path = newest(run)
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])

    return change


def flip(part: str) -> Callable[[Run], None]:
    """Flip one bit of the largest tensor of a part, in the file itself."""

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for inner in value.values():
                yield from tensors(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from tensors(inner)

    def change(run: Run) -> None:
        path = newest(run)
        checkpoint = torch.load(path, weights_only=True)
        largest = max(tensors(checkpoint[part]), key=torch.Tensor.numel)
        known = largest.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        content = bytearray(path.read_bytes())
        place = content.index(known) + len(known) // 2
        content[place] ^= 4
        path.write_bytes(bytes(content))

    return change


def rewritten(change_content, *, honest: bool) -> Callable[[Run], None]:
    """Another content, with the manifest of the old or (honest) of the new one."""

    def change(run: Run) -> None:
        path = newest(run)
        checkpoint = torch.load(path, weights_only=True)
        change_content(checkpoint)
        if honest:
            checkpoint.pop(MANIFEST)
            checkpoint[MANIFEST] = build_manifest(checkpoint)
        torch.save(checkpoint, path)

    return change


def _nan(checkpoint) -> None:
    next(iter(checkpoint["state_dict"].values())).view(-1)[7] = torch.nan


def other_model(run: Run) -> None:
    run.recipe = merge_runs(run.recipe, {"model": {"init_args": {"lora": {"rank": 2}}}})


def other_data(run: Run) -> None:
    train = "python:litgrpo.data.examples.problems.train?size=28&seed=5"
    run.recipe = merge_runs(run.recipe, {"data": {"init_args": {"train": train}}})


NAME = "last.ckpt"
# What was done, and the names and numbers that the error must have.
KINDS: dict[str, tuple[Callable[[Run], None], tuple[str, ...]]] = {
    "empty": (cut_to(0.0), (NAME,)),
    "cut in the middle": (cut_to(0.5), (NAME,)),
    "cut at the end": (cut_to(0.999), (NAME,)),
    "another file": (lambda run: newest(run).write_text("hello"), (NAME,)),
    "flipped bit in weights": (flip("state_dict"), (NAME, "state_dict", "sha256")),
    "flipped bit in optimizer state": (
        flip("optimizer_states"),
        (NAME, "optimizer_states", "sha256"),
    ),
    "lost optimizer": (
        rewritten(lambda c: c.pop("optimizer_states"), honest=False),
        (NAME, "optimizer_states"),
    ),
    "written without optimizer": (
        rewritten(lambda c: c.pop("optimizer_states"), honest=True),
        (NAME, "save_weights_only"),
    ),
    "lost manifest": (rewritten(lambda c: c.pop(MANIFEST), honest=False), (NAME, MANIFEST)),
    "weights that are NaN": (rewritten(_nan, honest=True), (NAME, " 1 of ", "NaN")),
    "other model": (other_model, ("model.lora.rank", "2")),
    "other data": (other_data, ("data.train", "size=28")),
}
OTHER_RUN = {"other model", "other data"}
