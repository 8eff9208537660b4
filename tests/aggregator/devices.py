"""Devices that ask an operator for their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from mycelia.privacy.secagg.certificates import IdentityProblem, IdentityReason
from mycelia.privacy.secagg.enrolment import Request
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.private_keys import new_tls_key


class Device(NamedTuple):
    tls: EllipticCurvePrivateKey
    identity: Identity
    request: Request


def device(name: str = "") -> Device:
    tls, identity = new_tls_key(), Identity.generate()
    return Device(tls, identity, Request.make(tls, identity, name))


def renewed(client: int, before: Identity) -> Device:
    tls, identity = new_tls_key(), Identity.generate()
    return Device(tls, identity, Request.make(tls, identity, "", renews=client, before=before))


def refused(reason: IdentityReason, call: Callable[[], object]) -> IdentityProblem:
    with pytest.raises(IdentityProblem) as caught:
        call()
    assert caught.value.reason == reason
    assert caught.value.rule
    return caught.value
