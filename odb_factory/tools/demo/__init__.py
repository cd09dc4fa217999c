"""Makes a tiny model and dataset, so that a training recipe can be tried without any download.

Nothing here imports torch or transformers before a model or tokenizer is made.
"""

from odb_factory.tools.demo.data import make_data
from odb_factory.tools.demo.make import DemoPaths, make_demo
from odb_factory.tools.demo.model import make_text_model, make_vl_model
from odb_factory.tools.demo.tokenizer import make_tokenizer

__all__ = ["DemoPaths", "make_data", "make_demo", "make_text_model", "make_tokenizer", "make_vl_model"]
