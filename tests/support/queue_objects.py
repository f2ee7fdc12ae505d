"""Tests of columns without tensors that every back end of the sample queue must pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from queue_contract import group, key, make_row, on_loop
from tutelage.data.trajectory import COLUMNS, Column
from tutelage.queue.contract import SampleQueue, SchemaError

MEDIA = [{"kind": "image", "uri": "runs/a/1.png", "size": [64, 48]}, None, "ünïcode", []]
"""Values of four rows."""


class ObjectContract:
    """Subclass it as Test…, with `make`."""

    def make(self) -> SampleQueue:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def declared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("media", "note"):
            monkeypatch.setitem(COLUMNS, name, Column(name, None, "row", "agent_loop"))

    async def filled(self) -> SampleQueue:
        """Media are put, notes are added, and every row has the same one."""
        queue = self.make()
        await queue.open(group(0), len(MEDIA))
        for sample, media in enumerate(MEDIA):
            await queue.put(key(0, sample), {**make_row(length=2 + sample), "media": media})
            assert await queue.update(key(0, sample), {"note": {"n": (1, 2)}, "reward": torch.tensor(float(sample))})
            await queue.seal(key(0, sample).episode, 1)
        return queue

    @on_loop
    async def test_objects_come_back_as_json_has_them(self) -> None:
        queue = await self.filled()
        assert not await queue.update(key(0), {"note": "another"}), "what is there stays"
        ref = await queue.take("train", ["media", "note"], 1)
        assert ref.columns[-2:] == ("media", "note")
        batch = await queue.get(ref, ["tokens", "reward", "media", "note"])
        assert batch.objects == {"media": MEDIA, "note": [{"n": [1, 2]}] * 4}
        assert batch.rows["reward"].tolist() == [0, 1, 2, 3]
        assert batch.select([2, 0]).objects["media"] == [MEDIA[2], MEDIA[0]]
        assert set(batch.row(1)) == {"tokens", "reward", "media", "note"}
        assert (await queue.get(ref.rows([3]), ["media"])).objects == {"media": [[]]}
        assert (await queue.get(ref.rows([]), ["media"])).objects == {"media": []}

    @on_loop
    async def test_objects_survive_a_snapshot(self) -> None:
        snapshot = await (await self.filled()).snapshot()
        queue = self.make()
        await queue.restore(snapshot)
        batch = await queue.get(await queue.take("train", ["note"], 1), ["media"])
        assert batch.objects == {"media": MEDIA}

    @on_loop
    async def test_what_json_cannot_hold_is_refused(self) -> None:
        queue = self.make()
        await queue.open(group(0), 1)
        for bad, why in (({1, 2}, "is a set"), (torch.zeros(2), "is a Tensor"), (float("nan"), "is a float")):
            wrong: dict[str, Any] = {**make_row(), "media": bad}
            with pytest.raises(SchemaError, match=f"{key(0)}: media: {why}, expected a value that JSON can hold"):
                await queue.put(key(0), wrong)
        await queue.put(key(0), make_row())
        with pytest.raises(SchemaError, match=r"reward: is a float, expected a torch\.float32 tensor"):
            await queue.update(key(0), {"reward": 1.0})
        with pytest.raises(ValueError, match="'latent' has no dtype, so it holds one value per row"):
            Column("latent", None, "step", "engines")
