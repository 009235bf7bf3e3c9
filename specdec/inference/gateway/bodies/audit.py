"""Body of /v1/audit: an earlier request of this API, and the output to check against it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from specdec.inference.gateway.bodies.body import WHOLE, Body, Text
from specdec.inference.gateway.bodies.schema import MAX_IDS, ChatBody, CompletionBody, TokenId
from specdec.inference.workers.completing.audit import NEAR_TIE


class AuditBody(Body):
    """Body of /v1/audit: an earlier request, and the output to check."""

    request: dict[str, Any] = Field(description="Body of /v1/chat/completions or /v1/completions, with its seed.")
    output: Annotated[Text, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)] = (
        Field(description="What followed the prompt: text as the model wrote it, or token ids.")
    )
    index: Annotated[int, Field(ge=0), WHOLE] = Field(0, description="Choice of the answer, where it has several.")
    near_tie: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = Field(
        NEAR_TIE, description="Margin up to which rounding may have decided."
    )

    def asked(self) -> ChatBody | CompletionBody:
        """Return the body of the earlier request.

        Raises:
            RequestValidationError: it is not valid.
        """
        kind = ChatBody if "messages" in self.request else CompletionBody
        try:
            return kind.model_validate(self.request)
        except ValidationError as exc:
            faults = [{**each, "loc": ("request", *each["loc"])} for each in exc.errors()]
            raise RequestValidationError(faults, body=self.model_dump()) from exc
