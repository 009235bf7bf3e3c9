"""What a handler is given besides its request."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""Its messages are typed where they are converted; here they are anything."""
