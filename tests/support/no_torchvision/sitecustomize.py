"""Start of every Python process with this folder on PYTHONPATH: vLLM's models with images, without torchvision.

For each of them vLLM imports a function of Pixtral's image processor, a file that needs torchvision. A module without
the processor takes its place; the name of this file is Python's own.
"""

import sys
from types import ModuleType

pixtral = ModuleType("transformers.models.pixtral.image_processing_pixtral")
vars(pixtral)["_num_image_tokens"] = None
sys.modules[pixtral.__name__] = pixtral
