"""Shared set-up of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lookahead_decoding import profile

# The models are tiny: further threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_tuned_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the developer has tuned must not decide what a test sees."""
    empty = tmp_path_factory.getbasetemp() / "no-tuned-profiles"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "folder", lambda: empty)
        yield
