"""What vLLM imports for `ec_connector: TensorferryConnector` with `ec_connector_module_path: tensorferry.vllm_ec`.

docs/engines.md says how to install and configure it.
"""

from tensorferry.connectors.vllm.connector import TensorferryConnector as TensorferryConnector
