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
def draft_model(folder, device, **options):
    return folder, device, options
class LLMPipeline:
    """Continues with the last token plus one, in rounds of one, then of two tokens, until a stop token."""
    def __init__(self, folder, device, **options):
        if os.environ.get("BROKEN") == "load":
            raise RuntimeError("no such\\nmodel")
        assert json.load(open(os.path.join(folder, "converted.json")))["from"]
        self.lookup = options.get("prompt_lookup", False)
        print("noise on the standard output")
    def generate(self, tensor, config=None, streamer=None, **lengths):
        if isinstance(tensor, str):
            return f"a text after {tensor} with {lengths}"
        if os.environ.get("BROKEN") == "decode":
            print("the last words", file=sys.stderr)
            os._exit(3)
        if os.environ.get("BROKEN") == "hang":
            time.sleep(60)
        assert not self.lookup or config.num_assistant_tokens in (4, 8, 16)
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
class Core:
    def compile_model(self, path, device, options):
        self.options = options
        return self
    def get_property(self, name):
        return {"INFERENCE_PRECISION_HINT": "f32"}.get(name) or self.options[name]
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
    vllm_config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(dtype="torch.float32"), cache_config=types.SimpleNamespace(cache_dtype="auto")
    )
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

XLLAMACPP = """
import http.server, json, threading, types
__version__ = "5.6"
common_speculative_type = types.SimpleNamespace(
    COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE="n-grams", COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE="a draft"
)
def CommonParams():
    drafting = types.SimpleNamespace(types=[], ngram_simple=types.SimpleNamespace(size_n=0, size_m=0))
    drafting.draft = types.SimpleNamespace(mparams=types.SimpleNamespace(), cpuparams=types.SimpleNamespace())
    drafting.draft.cpuparams_batch = types.SimpleNamespace()
    parts = {name: types.SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
    return types.SimpleNamespace(speculative=drafting, cache_type_k="f16", **parts)
class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, asked["repeat_last_n"], asked["cache_prompt"]) == ("/completion", 64, False)
        self.send_response(200)
        self.end_headers()
        # The token 10 ends a text.
        tokens = [asked["prompt"][-1] + 1 + place for place in range(asked["n_predict"])]
        tokens = tokens[: tokens.index(10) + 1] if 10 in tokens and Server.ends_with_10 else tokens
        if asked["stream"]:
            # The token 9 ends within a character in the second text, so that it is held back.
            parts = [{"tokens": [token]} for token in tokens if token != 9 or not Server.ends_with_10]
            end = {"tokens": [], "tokens_predicted": len(tokens), "timings": {"draft_n_accepted": Server.accepted}}
            for part in [*parts, end]:
                self.wfile.write(b"data: " + json.dumps(part).encode() + b"\\n\\n")
            Server.ends_with_10 = True
        else:
            self.wfile.write(json.dumps({"tokens": tokens}).encode())
def get_system_info():
    return "AVX2 = 1"
class Server:
    made, ends_with_10, accepted = [], False, 0
    def __init__(self, params):
        self.made.append(params)
        server = http.server.HTTPServer(("127.0.0.1", 0), _Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
"""
"""Its server does not end the first text."""
