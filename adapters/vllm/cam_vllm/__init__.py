"""CAM in vLLM: the KV connector `cam`. See README.md; `cam_vllm.connector` is the class vLLM instantiates."""

__version__ = "0.1.0"
