"""Ask a trained folder twenty varied prompts and print a transcript.

python configs/models/demo/train/sample.py configs/models/demo --temperature 0
"""

import argparse
import random

import stories
import torch
from tasks import passage
from transformers import AutoModelForCausalLM, AutoTokenizer

Messages = list[dict[str, str]]

CONVERSATIONS: tuple[tuple[str, ...], ...] = (
    (
        "Hello!",
        "My name is Clara and I live in Lisbon.",
        "What is chunked prefill?",
        "What is my name?",
        "Where do I live?",
    ),
    ("Tell me a story about a hedgehog.", "Who helped?", "Tell me another story."),
    ("Write a story about a robot in a lighthouse.",),
    ("What is TBT?", "And what is TTFT?", "How do they differ?"),
    ("Why do tokens stall?", "Thanks!"),
    ("how does legato avoid stalls",),
    ("What is a token budget?",),
    ("What does legato mean in music?",),
    ("What is the capital of Japan?", "And of Peru?"),
    ("What is 7 + 5?", "What is 9 - 4?", "6 times 7"),
    ("Count to 15.",),
    ("Sort these numbers: 17, 4, 23, 9",),
    ("Turn this into JSON with name, age and city: Priya is 31 years old and lives in Oslo.",),
    ("Write a poem about the moon.",),
    ("Write a poem about an owl.",),
    ("Explain quantum computing.",),
    ("Write a Python function that reverses a string.",),
    ("Repeat after me: the silver fox plays a slow song",),
    ("Who are you?", "What can you do?"),
    ("Tell me a joke.", "Goodbye"),
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current weather for a location.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "City name"}},
            "required": ["location"],
        },
    },
}
WITH_TOOLS: tuple[tuple[str, str], ...] = (
    ("user", "What is the weather in Oslo?"),
    ("tool", '{"temperature": 4, "sky": "cloudy"}'),
    ("user", "And in San Francisco?"),
)


def long_prompt() -> str:
    """About 2000 tokens: a few facts hidden between stories, and a question about one of them."""
    rng = random.Random(11)
    text, question, answer = passage(rng, 6)
    told = [stories.tell_long(rng, stories.story_slots(rng)) for _ in range(4)]
    told.insert(2, text)
    print(f"(expected: {answer})")
    return "Read this text:\n\n" + "\n\n".join(told) + f"\n\n{question}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32)
    plain = [[("user", text) for text in texts] for texts in (*CONVERSATIONS, (long_prompt(),))]
    for turns in (*plain, WITH_TOOLS):
        messages: Messages = []
        for role, question in turns:
            messages.append({"role": role, "content": question})
            inputs = tokenizer.apply_chat_template(
                messages,
                tools=[WEATHER] if turns is WITH_TOOLS else None,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            length = inputs["input_ids"].shape[1]
            sampling = {"do_sample": True, "temperature": arguments.temperature}
            if arguments.temperature == 0:
                sampling = {"do_sample": False, "temperature": 1.0}
            output = model.generate(**inputs, max_new_tokens=400, **sampling)
            answer = tokenizer.decode(output[0, length:], skip_special_tokens=True)
            shown = question if len(question) < 400 else f"[{length} tokens] ...{question[-80:]}"
            print(f"{role}> {shown}\nmodel> {answer}\n")
            messages.append({"role": "assistant", "content": answer})
        print("-" * 60)


if __name__ == "__main__":
    main()
