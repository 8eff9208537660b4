"""What the server says about itself: a read-only page and metrics (extra `status`), fed from one board."""

from mycelia.aggregator.status.board import Board
from mycelia.aggregator.status.page import StatusServer, available

__all__ = ["Board", "StatusServer", "available"]
