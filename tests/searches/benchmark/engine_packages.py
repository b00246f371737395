"""Source of stand-ins for the packages of engines, which continue a prompt with its last token plus one."""

OPENVINO_GENAI = '''
import json, os, sys, time
__version__ = "1.2"
class SchedulerConfig: pass
class StreamingStatus: RUNNING = 0
class StreamerBase:
    def __init__(self): pass
class GenerationConfig:
    def __init__(self, **fields): self.__dict__.update(fields)
class LLMPipeline:
    """Continues with the last token plus one, in rounds of one, then of two tokens, until a stop token."""
    def __init__(self, folder, device, **options):
        if os.environ.get("BROKEN") == "load":
            raise RuntimeError("no such\\nmodel")
        assert json.load(open(os.path.join(folder, "converted.json")))["from"]
        self.lookup = options.get("prompt_lookup", False)
        print("noise on the standard output")
    def generate(self, tensor, config, streamer):
        if os.environ.get("BROKEN") == "decode":
            print("the last words", file=sys.stderr)
            os._exit(3)
        assert (config.num_assistant_tokens if self.lookup else None) == (4 if self.lookup else None)
        tokens, last = [], int(tensor.data[0][-1])
        while len(tokens) < config.max_new_tokens:
            count = 1 if not tokens else 2
            step = [last + 1 + i for i in range(min(count, config.max_new_tokens - len(tokens)))]
            tokens, last = tokens + step, step[-1]
            streamer.write(step if len(step) > 1 else step[0])
            if last in config.stop_token_ids:
                break
        return type("Results", (), {"tokens": [tokens]})
'''

OPENVINO = """
class Tensor:
    def __init__(self, data):
        self.data = data
"""

VLLM = """
import types
__version__ = "3.4"
class _Fields:
    def __init__(self, **fields):
        self.__dict__.update(fields)
class SamplingParams(_Fields): pass
class TokensPrompt(_Fields): pass
class RequestOutputKind: DELTA = "delta"
class AsyncEngineArgs(_Fields): pass
class AsyncLLM:
    made = []
    @classmethod
    def from_engine_args(cls, arguments):
        engine = cls()
        engine.arguments = arguments
        cls.made.append(engine)
        return engine
    async def generate(self, prompt, sampling, request_id):
        assert (sampling.temperature, sampling.detokenize, sampling.output_kind) == (0.0, False, "delta")
        speculative = self.arguments.speculative_config
        drafted = speculative["num_speculative_tokens"] if speculative else 0
        made, last = 0, prompt.prompt_token_ids[-1]
        while made < sampling.max_tokens:
            count = min(1 + drafted if made else 1, sampling.max_tokens - made)
            tokens = [last + 1 + place for place in range(count)]
            made, last = made + count, tokens[-1]
            yield types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens)])
            if last in sampling.stop_token_ids:
                return
"""
"""The package and all of its modules. Each round after the first has one token and those that are drafted."""
