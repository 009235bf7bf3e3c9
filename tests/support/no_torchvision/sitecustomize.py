"""Lets vLLM load its models for images without torchvision, in each Python with this folder on PYTHONPATH.

For each such model vLLM imports a function of Pixtral's image processor, a file that needs torchvision. An empty module
takes its place. Python runs a file of this name at its start.
"""

import sys
from types import ModuleType

pixtral = ModuleType("transformers.models.pixtral.image_processing_pixtral")
vars(pixtral)["_num_image_tokens"] = None
sys.modules[pixtral.__name__] = pixtral
