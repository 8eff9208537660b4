"""Verification: bounds of networks that prove which rows no change within eps turns."""

from mycelia.attacks.defences.verification.verify import Method, Verified, verify

__all__ = ["Method", "Verified", "verify"]
