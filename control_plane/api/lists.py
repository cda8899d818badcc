"""How the API answers with several things."""

from typing import Generic, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


class Items(BaseModel, Generic[T]):
    items: list[T]
