"""Makes tokenizer.json and cases.json anew: what the Python libraries make of requests, for the tests to compare with.

Needs tokenizers and jinja2. Templates are rendered as transformers does it (utils/chat_template_utils.py), after the request's
messages were put into vLLM's form (entrypoints/chat_utils.py), both written down here again.
"""

import json
import pathlib
import re

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
WORDS = pathlib.Path(HERE / "../../README.md").read_text()


def train():
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(
        pattern=Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        behavior="isolated",
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(WORDS.splitlines(keepends=True), trainer)
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def in_vllm_form(message, wraps):
    content = message.get("content")
    parts = [] if content is None else [content] if isinstance(content, str) else content
    texts = [part if isinstance(part, str) else part["text"] for part in parts]
    content = [{"type": "text", "text": text} for text in texts] if wraps else "\n".join(texts)
    shown = {"role": message["role"], "content": content}
    if message["role"] == "assistant" and message.get("tool_calls"):
        shown["tool_calls"] = json.loads(json.dumps(message["tool_calls"]))
        for call in shown["tool_calls"]:
            arguments = call["function"].get("arguments")
            call["function"]["arguments"] = json.loads(arguments) if arguments else {}
    if message["role"] == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        shown["name"] = message["name"]
    return shown


def tool_in_vllm_form(tool):
    function = dict(tool["function"])
    first = {name: function.pop(name, None) for name in ("name", "description", "parameters")}
    return {"type": tool.get("type", "function"), "function": first | function}


def render(template, wraps, body):
    tools = body.get("tools")
    # Transformers' own tag: it renders as what stands in it.
    template = re.sub(r"\{%(-?) generation %\}", r"{%\1 if true %}", template)
    template = re.sub(r"\{%(-?) endgeneration %\}", r"{%\1 endif %}", template)
    return (
        environment()
        .from_string(template)
        .render(
            messages=[in_vllm_form(message, wraps) for message in body["messages"]],
            tools=None if tools is None else [tool_in_vllm_form(tool) for tool in tools],
            documents=None,
            add_generation_prompt=body.get("add_generation_prompt", True),
            bos_token="<|begin|>",
            eos_token="<|im_end|>",
            **body.get("chat_template_kwargs", {}),
        )
    )


WEATHER = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number", "default": 1.0}}},
        "name": "weather",
        "description": "Tells the \"weather\" <of> a city & more; für Köln, too",
    },
}
SYSTEM = {"role": "system", "content": "You route requests. Keep answers short, and say what you do not know."}
ASKS = {"role": "user", "content": "Which worker holds the longest prefix,\nand is it overloaded?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Köln\", \"days\": 2}"}}
    ],
}
TELLS = {"role": "tool", "tool_call_id": "c1", "content": "{\"sky\": \"grey\"}"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "first part"}, {"type": "text", "text": " second 👩‍🔬 part "}]}
REQUESTS = [
    {"messages": [ASKS]},
    {"messages": [SYSTEM, ASKS]},
    {"messages": [SYSTEM, ASKS, {"role": "assistant", "content": " The second one. "}, PARTS]},
    {"messages": [SYSTEM, ASKS], "add_generation_prompt": False},
    {"messages": [SYSTEM, PARTS], "tools": [WEATHER]},
    {"messages": [ASKS, CALLS, TELLS, ASKS], "tools": [WEATHER, {"type": "function", "function": {"name": "stop", "strict": True}}]},
    {"messages": [ASKS], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [ASKS], "chat_template_kwargs": {"enable_thinking": True, "depth": 1e-5}},
    {"messages": [{"role": "user", "content": "It says <|im_end|> and <|im_start|>system <tool_call> in the text"}]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": "\n\n x\t"}]},
]


def main():
    tokenizer = train()
    tokenizer.save(str(HERE / "tokenizer.json"))
    cases = []
    for name, wraps in [("chatml.jinja", False), ("parts.jinja", True)]:
        template = (HERE / name).read_text()
        for body in REQUESTS:
            text = render(template, wraps, body)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append({"template": name, "request": body, "text": text, "ids": ids})
    texts = ["", "Which worker", "It says <|im_end|> here", "  two  spaces\n\n\n and für 12345 Köln 👩‍🔬"]
    plain = [{"prompt": text, "ids": tokenizer.encode(text).ids} for text in texts]
    shown = json.dumps({"chat": cases, "plain": plain}, ensure_ascii=False, indent=1)
    (HERE / "cases.json").write_text(shown + "\n")


main()
