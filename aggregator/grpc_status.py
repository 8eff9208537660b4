"""The gRPC status that goes with each reason of the secure sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mycelia.privacy.secagg.messages import Reason, SecureSumError

__all__ = ["status_code"]

_STATUS: Final[Mapping[Reason, str]] = {
    Reason.BAD_SIGNATURE: "PERMISSION_DENIED",
    Reason.REPLAY: "FAILED_PRECONDITION",
    Reason.ALREADY_RELEASED: "FAILED_PRECONDITION",
    Reason.MODEL_MISMATCH: "FAILED_PRECONDITION",
    Reason.POLICY: "FAILED_PRECONDITION",
    Reason.WRONG_PHASE: "FAILED_PRECONDITION",
    Reason.JOURNAL: "FAILED_PRECONDITION",
    Reason.SPLIT_VIEW: "ABORTED",
    Reason.BAD_SHARE: "ABORTED",
    Reason.INCONSISTENT_SURVIVORS: "ABORTED",
    Reason.COHORT_TOO_SMALL: "ABORTED",
    Reason.UNMASK_SHORT: "ABORTED",
    Reason.EMPTY_WEIGHT: "ABORTED",
    Reason.LATE: "DEADLINE_EXCEEDED",
    Reason.EQUIVOCATION: "ALREADY_EXISTS",
    Reason.SESSION: "NOT_FOUND",
    Reason.SUM_OUT_OF_RANGE: "DATA_LOSS",
    Reason.BUDGET: "RESOURCE_EXHAUSTED",
}


def status_code(error: SecureSumError) -> str:
    """The gRPC status that goes with an error; INVALID_ARGUMENT for what is wrong in itself."""
    if error.reason == Reason.SHARE_MISMATCH and error.client is None:
        return "DATA_LOSS"  # the owner's fault: nobody can open the sum
    return _STATUS.get(error.reason, "INVALID_ARGUMENT")
