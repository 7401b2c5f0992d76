"""A Ray that cannot be joined or started: what happened, and what to do."""

import pytest
import ray

from rayloader import RaySessionError, session


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, r"could not be started on this machine.* call iter\(\) again, or run `ray start --head`"),
        ("local", "could not be started on this machine"),
        ("127.0.0.1:1", r"RAY_ADDRESS=127\.0\.0\.1:1 names could not be joined; set it .* or unset it"),
    ],
)
def test_a_ray_that_does_not_come_up_is_an_error_that_says_what_to_do(address, message, monkeypatch):
    def fail(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(session, "current", lambda: None)  # whatever other tests have started
    monkeypatch.setattr(session, "_starter", None)
    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RaySessionError, match=message) as caught:
        session.ensure()
    assert str(caught.value).endswith("Ray said: The current node timed out during startup.")
    assert str(caught.value.__cause__) == "The current node timed out during startup."
