"""What tests of devices may share."""

from tests.simulations.conftest import captured_once

__all__ = ["captured_once"]
