"""The lines at the start of a fit."""

from lightning_ddp_hooks.strategy.summary import mib, summary_text

FACTS = {
    "world_size": 4,
    "comm_backend": "gloo",
    "backend": "native",
    "total_parameter_size_bytes": 64 << 20,
    "num_parameter_tensors": 150,
    "first_bucket_bytes": 1 << 20,
    "bucket_cap_bytes": 25 << 20,
}


def test_it_says_who_sends_what() -> None:
    assert summary_text(FACTS, {"hook": "PowerSGD(rank=1)", "averager": None, "optimizer": "sharded"}).split("\n") == [
        "lightning_ddp_hooks: 4 ranks over gloo, native reducer",
        "  gradients  64 MiB of 150 parameters, in buckets of 1 MiB and then 25 MiB",
        "  a step     sends 96 MiB from each rank without a hook",
        "  hook       PowerSGD(rank=1)",
        "  optimizer  sharded",
    ]


def test_one_rank_sends_nothing() -> None:
    text = summary_text({**FACTS, "world_size": 1, "first_bucket_bytes": 25 << 20}, {"hook": None})
    assert "1 rank over gloo" in text
    assert "in buckets of 25 MiB" in text
    assert "sends 0 MiB from each rank" in text


def test_sizes_have_as_many_digits_as_they_need() -> None:
    assert [mib(n) for n in (0, 1 << 20, 1 << 10, 1.5 * (1 << 20), 58.72 * (1 << 20))] == [
        "0 MiB",
        "1 MiB",
        "0.0010 MiB",
        "1.50 MiB",
        "58.7 MiB",
    ]
