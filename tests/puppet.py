"""A scripted agent that speaks through a real model's tokenizer: canonical replies with ids, for tests of readouts."""

from __future__ import annotations

from klb_probe.dialogue.player import Reply
from klb_probe.dialogue.scripted import open_scripted
from klb_probe.dialogue.spoken import text_ends


class Puppet:
    """Says what a scripted agent says; prompts and replies are the model's ids, as a local player would have them."""

    def __init__(self, model, spec="scripted:deceptive"):
        self.model, self.scripted, self.name = model, open_scripted(spec), model.name
        self.requests = []

    def record(self):
        return {"kind": "local", "fingerprint": self.model.fingerprint}

    def forget(self, conversation):
        """Nothing is kept."""

    def reply(self, requests):
        self.requests += requests
        return [self._one(request) for request in requests]

    def _one(self, request):
        prompt = self.model.chat.encode_chat([(message.role, message.content) for message in request.messages])
        text = "Yes" if request.part == "elicited" else self.scripted.reply([request])[0].text
        ids = self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Reply(text, prompt_ids=tuple(prompt), ids=tuple(ids), ends=text_ends(self.model.tokenizer, ids, text))
