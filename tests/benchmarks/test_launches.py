import pytest

from tests.benchmarks import launches
from tests.benchmarks.launches import Counts, Iteration
from tests.cuda_device.run import needs_cuda, on_cuda, run_on_cuda

PAGE = "before\n<!-- launches -->\nNot run.\n<!-- end -->\nafter\n"


@on_cuda()
def test_an_iteration_is_counted_by_phase():
    counts = launches.count_iteration(launches.SHAPES["tiny"], new=12)
    # Decoding is counted without reading the prompts; a token is one replay of a recorded step.
    assert counts.rollout.launches > counts.prompts.launches > 0
    longer = launches.count_iteration(launches.SHAPES["tiny"], new=20)
    assert 8 <= longer.rollout.launches - counts.rollout.launches < 16
    assert longer.rollout.waits - counts.rollout.waits <= 1  # every 16 tokens
    assert longer.rollout.num_bytes > counts.rollout.num_bytes
    assert counts.token.num_bytes > counts.least_bytes
    # All 64 rows have a gradient, and the step is taken, not skipped for its values.
    assert counts.micro_batches == 1
    assert 0 < counts.waits < counts.update.waits < counts.waits + 10
    assert counts.update.launches > counts.rollout.launches / 12


@on_cuda()
def test_attention_is_one_kernel_forward_and_three_backward():
    import torch

    from tests.cuda_device.device import count_work

    query, keys = torch.rand(2, 4, 8, 16, device="cuda"), torch.rand(2, 2, 8, 16, device="cuda")
    query.requires_grad_()
    with launches.fuse_attention():
        with count_work() as work:
            attend = torch.nn.functional.scaled_dot_product_attention
            output = attend(query, keys, keys, enable_gqa=True)
        assert output.shape == query.shape
        assert work.launches == {"attention": 1}
        with count_work() as work:
            output.sum().backward()
        assert work.launches["attention (backward)"] == 3
    attended = attend(query, keys, keys, enable_gqa=True)  # torch's again
    expected = attend(query.cpu(), keys.cpu(), keys.cpu(), enable_gqa=True)
    assert torch.allclose(attended.cpu(), expected, atol=1e-6)


def test_a_phase_takes_the_longer_of_device_and_host():
    assert Counts(launches=1000, device_s=0.5).seconds(1e-3) == 1.0
    assert Counts(launches=100, device_s=0.5).seconds(1e-3) == 0.5
    rollout, prompts = Counts(1010, 260, 1e9, 0.9), Counts(10, 5, 1e8, 0.5)
    counts = Iteration(256, 1e8, prompts, rollout, Counts(device_s=0.25), 2, 20)
    assert counts.token == Counts(1000, 255, 9e8, 0.4) / 255
    assert counts.seconds == pytest.approx(0.5 + 0.4 + 0.25)


@needs_cuda
def test_the_command_writes_the_page(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text(PAGE)
    words = ("--sizes", "tiny", "--new", "8", "--page", str(page))
    done = run_on_cuda("-m", "tests.benchmarks.launches", *words)
    assert done.returncode == 0, done.stderr
    table = page.read_text().split("<!-- launches -->\n")[1]
    assert table.startswith("Simulated: no time was measured on a GPU. Command: `python -m")
    assert "|  | tiny |" in table
    assert "Not run" not in page.read_text()
    assert page.read_text().endswith("<!-- end -->\nafter\n")
