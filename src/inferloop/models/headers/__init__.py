"""What a model file says about itself, read without loading a weight."""

from __future__ import annotations

from inferloop.models.headers.header import ModelHeader, TensorInfo
from inferloop.models.headers.read import read_header
from inferloop.models.headers.structure import RopeSpec, Structure

__all__ = ["read_header", "ModelHeader", "RopeSpec", "Structure", "TensorInfo"]
