"""What other serving engines load of ours: `ec/` hands encoder outputs between engines, `vllm/` plugs it into vLLM."""
