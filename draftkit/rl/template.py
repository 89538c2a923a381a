"""What a chat template puts between turns, so that a conversation can grow by the engine's own tokens.

    <im_start> user .. <im_end> \n <im_start> assistant \n   2 + 2 is 4 <im_end>   \n <im_start> tool .. assistant \n
    |------------------ prompt() -----------------------|   |---- sampled -----|   |---------- between() ---------|

Sampled tokens stay as they are: text is rendered only to learn what stands around them, with a placeholder where an
assistant's turn is. That asks of a template that the conversation so far is a prefix of the longer one. Some rewrite
history (they strip the thinking of earlier turns): what such a policy would read when served is not what it was
trained on, so they are refused.

A tool's message goes out under the role `tool` where the template renders that role, else as the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from draftkit import console
from draftkit.errors import UserError
from draftkit.models import render, render_text
from draftkit.types import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

ASKED = {"role": "user", "content": "SOMETHING ASKED"}
SAID, TOLD = "SOMETHING SAID", "SOMETHING TOLD"
THOUGHT = f"<think>\nSOMETHING THOUGHT\n</think>\n\n{SAID}"  # what a template that strips thinking would strip


class ChatTemplate:
    """The tokens that a tokenizer's template puts before, between and after what an assistant says.

    end_of_turn: the token that an assistant ends a turn with: what the template puts after one where that is a special
    token, else the tokenizer's own end of text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        self._checked: set[str] = set()
        self._tool_role: str | None = None
        said = [ASKED, {"role": "assistant", "content": SAID}]
        after = self.encode(render_text(tokenizer, said, thinking, generation_prompt=False).rpartition(SAID)[2])
        closes = bool(after) and after[0] in tokenizer.all_special_ids
        self.end_of_turn: int | None = after[0] if closes else tokenizer.eos_token_id

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return render(self.tokenizer, [self._renamed(m) for m in messages], self.thinking)

    def turn(self, content: str) -> list[int]:
        """An assistant's turn as the policy would have to sample it."""
        return self.encode(content) + ([] if self.end_of_turn is None else [self.end_of_turn])

    def between(self, messages: Sequence[Message], last_token: int | None = None) -> list[int]:
        """Tokens from the end of an assistant's turn to the beginning of its next.

        messages: the conversation so far, ending with what was told since. last_token: the last that was sampled; where
        it is the template's own end of turn, that token is not put twice.
        """
        turn = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        for role in {m["role"] for m in messages[turn + 1 :]}:
            self.check(role)
        shown = [{**m, "content": SAID} if m["role"] == "assistant" else m for m in messages]
        whole, so_far = self._text(shown), self._text(shown[:turn]) + SAID
        if not whole.startswith(so_far):
            raise _rewrites("the turns already taken")
        ids = self.encode(whole[len(so_far) :])
        return ids[1:] if ids and last_token == ids[0] == self.end_of_turn else ids

    def check(self, role: str = "tool") -> None:
        """Refuse a template that changes earlier turns when messages of this role are added. Raises UserError."""
        if role in self._checked:
            return
        for said in (SAID, THOUGHT):
            messages: list[Message] = [ASKED]
            for _ in range(2):
                so_far = self._text(messages) + said
                messages += [{"role": "assistant", "content": said}, {"role": role, "content": TOLD}]
                if not self._text(messages).startswith(so_far):
                    raise _rewrites("the turns already taken" if said == SAID else "the thinking of earlier turns")
        self._checked.add(role)

    @property
    def tool_role(self) -> str:
        """`tool`, or `user` where the template refuses or drops a tool's message."""
        if self._tool_role is None:
            turns = [ASKED, {"role": "assistant", "content": SAID}, {"role": "tool", "content": TOLD}]
            try:
                text = render_text(self.tokenizer, turns, self.thinking)
            except TemplateError:  # templates raise it on purpose for a role that they do not know
                text = ""
            self._tool_role = "tool" if TOLD in text else "user"
            if self._tool_role == "user":
                console.say_once("the chat template has no role `tool`: a tool's results are given as the user's")
        return self._tool_role

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _renamed(self, message: Message) -> Message:
        return {**message, "role": self.tool_role} if message["role"] == "tool" else message

    def _text(self, messages: Sequence[Message]) -> str:
        return render_text(self.tokenizer, [self._renamed(m) for m in messages], self.thinking)


def _rewrites(what: str) -> UserError:
    return UserError(
        f"The model's chat template rewrites history: it changes {what} when a message is added.",
        "Put a template that keeps every turn as it was (chat_template.jinja) beside the model.",
    )


def worked_document(template: ChatTemplate, messages: Sequence[Message], answer: Sequence[Message]) -> Document:
    """A worked example as a supervised document: the prompt's messages, then turns of which the assistant's are
    supervised, each with the token that ends it."""
    tokens = template.prompt(messages)
    mask = [False] * len(tokens)
    conversation = list(messages)
    for i, message in enumerate(answer):
        conversation.append(message)
        if message["role"] == "assistant":
            added = template.turn(message["content"])
        elif i + 1 < len(answer) and answer[i + 1]["role"] == "assistant":  # all that was told, before the next turn
            added = template.between(conversation, tokens[-1])
        else:
            continue
        tokens += added
        mask += [message["role"] == "assistant"] * len(added)
    return Document(tuple(tokens), tuple(mask))
