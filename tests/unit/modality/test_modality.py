"""Test the interface between modalities and the rest of the code."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tiny_paint
from tutelage.data.messages import Message
from tutelage.data.trajectory import Episode, EpisodeKey, Prompt, Trajectory
from tutelage.engines.contract import DiffusionSampling, Sampling
from tutelage.errors import UserError
from tutelage.modality import modality_of
from tutelage.modality.diffusion import DiffusionModality
from tutelage.modality.diffusion_episodes import DiffusionEpisodes
from tutelage.modality.text import TextModality
from tutelage.modality.text_episodes import TextEpisodes
from tutelage.models.tokenizers import SafeTokenizer

KEY = EpisodeKey("train", 0, 0)
PROMPT = Prompt(uid=0, row=1, source="rows.jsonl", messages=(Message("user", "hi"),))
ROW = Trajectory(torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(1), torch.zeros(1, dtype=torch.int32))


async def nowhere(request: Any) -> Any:
    raise AssertionError("no request is expected")


def test_the_config_chooses_the_modality(tmp_path: Path) -> None:
    text, media = modality_of(tiny.config(tmp_path)), modality_of(tiny_paint.config(tmp_path))
    assert isinstance(text, TextModality)
    assert isinstance(media, DiffusionModality)
    assert (text.library, media.library) == ("transformers", "diffusers")
    assert text.tokenizer is not None
    assert media.tokenizer is None


def test_a_step_is_measured_in_what_the_student_makes(tmp_path: Path) -> None:
    text, media = modality_of(tiny.config(tmp_path)), modality_of(tiny_paint.config(tmp_path))
    assert text.step_metrics(30, 6, 2.0) == {"tokens": 30.0, "length": 5.0, "tokens_per_second": 15.0}
    assert media.step_metrics(30, 6, 2.0) == {"trained_steps": 30.0, "pictures_per_second": 3.0}


def test_truncated_sampling_is_worth_a_note(tmp_path: Path) -> None:
    assert modality_of(tiny.config(tmp_path)).notes() == []
    assert modality_of(tiny_paint.config(tmp_path)).notes() == []
    cut = modality_of(tiny.config(tmp_path, rollout={"top_p": 0.9})).notes()
    assert len(cut) == 1
    assert cut[0].startswith("rollout.top_p = 0.9 and rollout.top_k = 0 cut the tail off")


class Names:
    """Something that there is one of for each modality."""

    def of_text(self, modality: TextModality) -> str:
        return f"text: {type(modality.config).__name__}"

    def of_media(self, modality: DiffusionModality) -> str:
        return f"media: {type(modality.config).__name__}"


def test_a_modality_chooses_what_is_for_it(tmp_path: Path) -> None:
    assert modality_of(tiny.config(tmp_path)).choose(Names()) == "text: Config"
    assert modality_of(tiny_paint.config(tmp_path)).choose(Names()) == "media: DiffusionConfig"


def test_a_loop_that_writes_is_refused_where_the_student_paints() -> None:
    context = DiffusionEpisodes(nowhere).context(KEY, 0, DiffusionSampling(4, 8, 8), str(PROMPT))
    with pytest.raises(UserError, match="this loop generates text, but the student is a diffusion model"):
        context.render(PROMPT)
    with pytest.raises(UserError, match="this loop generates text, but the student is a diffusion model"):
        asyncio.run(context.generate(torch.tensor([1])))


def test_a_loop_that_paints_is_refused_where_the_student_writes() -> None:
    context = TextEpisodes(SafeTokenizer(tiny.tokenizer()), 100, nowhere).context(KEY, 0, Sampling(), str(PROMPT))
    with pytest.raises(UserError, match="this loop generates images or video, but the student is a language model"):
        asyncio.run(context.paint("a cat"))


def test_a_painting_has_denoising_steps() -> None:
    episodes = DiffusionEpisodes(nowhere)
    whole = Episode(KEY, PROMPT, (replace(ROW, extra={"sigmas": torch.zeros(1)}),))
    assert episodes.finished(whole) is whole
    with pytest.raises(ValueError, match="trajectory 0: it has no denoising steps"):
        episodes.finished(replace(whole, trajectories=(ROW,)))
