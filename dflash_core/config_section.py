"""What every group of settings is made of: the strict base class, the types that several of them share, and their digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
LARGEST = 2**31 - 1  # what lengths and counts of tensors, Arrow and drafters elsewhere hold
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
LoosePath = Annotated[Path, Field(strict=False)]
COLDEST = 0.01  # divided by less, logits leave the range of float32


def _greedy_or_warm(temperature: float) -> float:
    if 0.0 < temperature < COLDEST:
        raise ValueError(f"is neither 0 nor at least {COLDEST}")
    return temperature


Temperature = Annotated[float, Field(ge=0.0), AfterValidator(_greedy_or_warm)]
_SPREAD = r"(cpu|cuda:\d+)(\+(cpu|cuda:\d+))*"  # one device, or those that the layers of one target are spread over
SpreadDevice = Annotated[str, Field(pattern=rf"^({_SPREAD}|cuda)$")]
NumberedSpreadDevice = Annotated[str, Field(pattern=rf"^{_SPREAD}$")]


def holds_password(address: str) -> bool:
    """Whether there is a ``user:password@`` before the host of an address."""
    return ":" in address.partition("://")[2].partition("/")[0].rpartition("@")[0]


def devices_of(device: str) -> tuple[str, ...]:
    """The devices of a target: 'cuda:0+cuda:1' are two, over which its layers are spread."""
    return tuple(device.split("+"))


def _number_fields(schema: dict[str, Any]) -> None:
    """Give every field of a JSON schema its place: forms are made from schemas, and keep the order of the file by it."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


class Section(BaseModel):
    """Base of every group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_number_fields)


def digest_of(value: object) -> str:
    """sha256 (hex) of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()
