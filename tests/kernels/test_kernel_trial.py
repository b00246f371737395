"""A kernel that fails its trial is replaced by torch's operators, with one line in the log."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from layerskip.device.trial import passes_trial
from layerskip.kernels import decode_attention as attention
from layerskip.kernels import few_rows_linear as few_rows
from layerskip.kernels.decode_attention import decode_attention
from layerskip.kernels.few_rows_linear import few_rows_linear


def test_torchs_operators_replace_a_kernel_that_fails_its_trial(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For this kind of input alone; the trial draws its own inputs of the same shapes."""
    monkeypatch.setattr(few_rows, "multiply_on_gpu", lambda hidden, weight, *_: hidden.new_zeros(1, 2, weight.shape[0]))
    monkeypatch.setattr(attention, "attend_on_gpu", lambda query, *_: query.new_zeros(query.transpose(1, 2).shape))
    hidden, weight, residual = torch.randn(1, 2, 7), torch.randn(5, 7), torch.randn(1, 2, 5)
    product = few_rows_linear._backend_fns["cuda"](hidden, weight, residual)
    torch.testing.assert_close(product, residual + linear(hidden, weight))
    states = [torch.randn(1, 2, count, 8) for count in (3, 9, 9)]
    mask = torch.zeros(1, 1, 3, 9)
    attended = decode_attention._backend_fns["cuda"](*states, mask, 0.5)
    torch.testing.assert_close(attended, scaled_dot_product_attention(*states, mask, scale=0.5).transpose(1, 2))
    assert [record.message.split(" cannot")[0] for record in caplog.records] == [
        f"the kernel for {name}" for name in ("products of few rows", "attention of few queries")
    ]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda: (torch.ones(2), torch.zeros(2)), "it gives other results"),
        (lambda: (_ for _ in ()).throw(ValueError("no\nsuch")), "no"),
    ],
)
def test_a_kernel_that_fails_its_trial_is_not_used(run: object, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once, and one line is logged."""
    for _ in range(2):
        assert not passes_trial("products", reason, run)  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [f"the kernel for products cannot be used ({reason}): {reason}"]
    assert passes_trial("products", "right", lambda: (torch.ones(2), torch.ones(2)))
