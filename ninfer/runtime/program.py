"""The memory and the model of one device: a record in, a unit of work done, a record out.

It knows rows, pages and slots, and nothing of requests. All its memory is taken at construction and all that
changes between units stands in buffers at fixed addresses, so that a round is recorded once per number of
rows and then replayed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ninfer import ops
from ninfer.errors import CapacityError
from ninfer.formats import KvFormat
from ninfer.models import Batch, Cache, Model
from ninfer.runtime.memory import allocate, allocate_records, available_bytes, tensors_of, zeros
from ninfer.runtime.plan import MAX_CONCURRENCY, Limits, Plan, make_plan
from ninfer.runtime.predict import Predict
from ninfer.runtime.records import Unit, copy_record, header_of, ingress
from ninfer.runtime.transfer import transfer

_ROUND = int(Unit.ROUND)


def plan_model(
    model: Model,
    limits: Limits,
    *,
    kv_format: KvFormat = KvFormat.BF16,
    weight_bytes: int = 0,
    graphs: bool = True,
) -> Plan:
    """The memory that serving `model` takes. Raises `CapacityError` or `OptionError`.

    Weights count as memory still to be taken where they are mapped from a file (on the CPU); a GPU holds them
    already. `graphs`: as for the Program.
    """
    available = available_bytes(model.device)
    if available is not None and model.device.type == "cpu":
        available = max(available - weight_bytes, 0)
    return make_plan(
        replace(model.kv_layout(), format=kv_format),
        model.state_layout(),
        limits,
        context_limit=model.max_position_embeddings,
        public_tokens=model.public_tokens,
        workspace_bytes=_workspace_bytes(model, limits),
        graph_bytes=_graph_bytes(model, limits, graphs),
        weight_bytes=weight_bytes,
        available_bytes=available,
    )


def _widths(model: Model, width: int) -> list[int]:
    """Columns of a row in rounds: a predictor takes part in each, so there is only one number then."""
    return sorted({1, width}) if model.predictor is None else [width]


def _rounds(model: Model, limits: Limits) -> list[tuple[int, int]]:
    """(rows, columns of a row) of every round that will be recorded."""
    most = min(limits.max_concurrency, MAX_CONCURRENCY)
    return [(rows, width) for rows in range(1, most + 1) for width in _widths(model, limits.width)]


def _workspace_bytes(model: Model, limits: Limits) -> int:
    """The largest prefill, and every round that will be recorded, with its scores."""
    context = max(limits.max_context, 1)
    columns = max(min(limits.prefill_chunk, context), limits.max_concurrency * limits.width)
    kept = [_round_bytes(model, rows, width, context) for rows, width in _rounds(model, limits)]
    shared = ops.workspace(model.device).reuses()
    prefill = model.workspace_bytes(columns, context)
    if model.predictor is not None:
        # It follows the model, whose hidden states are kept and once more moved on by one.
        held = 2 * columns * model.hidden_size * model.dtype.itemsize
        prefill = max(prefill, held + model.predictor.workspace_bytes(columns, context))
    return prefill + (max(kept) if shared else sum(kept))


def _round_bytes(model: Model, rows: int, width: int, context: int) -> int:
    count, scores = rows * width, 4 * model.public_tokens
    kept = model.round_bytes(count, context) + scores * count
    if model.predictor is not None:
        kept += model.predictor.round_bytes(count, context, rows)
        kept += (width - 1) * (model.predictor.round_bytes(rows, context, rows) + scores * rows)
    return kept


def _graph_bytes(model: Model, limits: Limits, graphs: bool) -> int:
    """Code on the device, and the recordings themselves."""
    sizes = ops.workspace(model.device)
    return sizes.fixed_bytes() + graphs * len(_rounds(model, limits)) * sizes.recording_bytes()


class Program:
    """Carries out units of work (`records.Unit`) on `model`; owns KV pages, state slots and counts.

    `ingress` is the record that it reads: whoever shares its memory may write there and pass it to `run`, any
    other record is copied first.

    Pages and slots belong to whoever writes the records: nothing is checked or cleared here. A unit reads
    source slots and committed positions and writes target slots and positions behind them, so that a unit
    whose results are dropped has changed nothing that counts but the penalty counts of the tokens it fed.
    """

    def __init__(self, model: Model, plan: Plan, *, graphs: bool = True) -> None:
        """`graphs` off runs every round step by step, which gives the same tokens."""
        shape, device = plan.shape, model.device
        self.plan = plan
        self._model, self._device, self._graphs = model, device, graphs
        self._cache: Cache = allocate(
            plan.kv, model.state_layout(), pages=plan.pages + plan.copies, slots=plan.slots, device=device
        )
        self._records = None
        if shape.width > 1:
            self._records = allocate_records(model.state_layout(), shape.draws, device)
        self._counts = zeros((shape.count_rows, model.public_tokens), torch.int32, device)
        self._transfer = transfer(shape, device)
        self.ingress, self._egress = self._transfer.ingress, self._transfer.egress
        self._header = header_of(self.ingress)
        self._seconds = self._egress["seconds"]
        self._produced = self._egress["produced"][0]
        self._fields, results = self._transfer.fields, self._transfer.results
        self._drawn = results["tokens"]
        self._logprobs = [results[name] for name in ("logprob", "top_ids", "top_logprobs")]
        self._pool = ops.recording_pool(device)
        self._rounds: dict[tuple[int, int], ops.Recording[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._hidden: torch.Tensor | None = None
        """Of the columns of the newest round."""
        self._predict: Predict | None = None
        if shape.drafts:
            self._predict = Predict(model, self._cache, self._fields, results["drafts"])
        self._stand = results["produced"]

    def run(self, record: np.ndarray) -> np.ndarray:
        """Do the unit that the record describes; the result is overwritten by the next call."""
        if record is not self.ingress:
            copy_record(self.ingress, record)
        unit, rows, columns, *copied = self._header.tolist()
        transfer = self._transfer
        with transfer.within:
            transfer.send()
            drawn = None
            if unit == _ROUND:
                drawn = self._round(rows, columns)
            else:
                with torch.inference_mode():
                    if unit == Unit.PREFILL:
                        drawn = self._prefill(columns, *copied)
                    elif unit == Unit.CONTROL:
                        self._control(rows, columns)
                    elif unit == Unit.FOLD:
                        self._fold(rows)
                    else:
                        raise ValueError(f"{unit} is not a unit of work")
            self._seconds[0] = transfer.receive()
        if drawn is not None and (unit != _ROUND or columns == 1):
            self._produced[:rows] = 1
        return self._egress

    def warm_up(self) -> None:
        """Run every kind of round once on dead pages, so that code is loaded and recordings are made.

        On a GPU also prefills of all sizes, the largest at the end of the context: what the plan counted is
        taken now, or `CapacityError` says that it isn't there.
        """
        try:
            if self._device.type != "cpu":
                self._warm_prefills()
            self._warm_rounds()
        except torch.OutOfMemoryError:
            raise CapacityError(
                f"the memory of {self._device} ran out beside the plan of {self.plan.total_bytes >> 20} MiB; "
                f"lower --prefill-chunk or --max-context, or use --kv-capacity auto with more "
                f"--vram-headroom-mib"
            ) from None
        if self._device.type != "cpu":
            self._clear()

    def _warm_prefills(self) -> None:
        """Of every power of two, one more than that, and a whole chunk, all positions on page 0: kernels are
        compiled once for numbers that are multiples of 16 and once for others."""
        record, chunk, context = ingress(self.plan.shape), self.plan.prefill_chunk, self.plan.max_context
        record["unit"], record["rows"], record["purpose"] = Unit.PREFILL, 1, 0
        record["source_slots"], record["target_slots"] = -1, 0
        powers = [1 << power for power in range(chunk.bit_length()) if 1 << power < chunk]
        sizes = sorted({*powers, *(size + 1 for size in powers if size + 1 < chunk)})
        for columns, begin in [(chunk, context - chunk), *((size, 0) for size in sizes)]:
            record["columns"] = columns
            record["positions"][0, :columns] = np.arange(begin, begin + columns)
            self.run(record)

    def _clear(self) -> None:
        """Memory as it was made."""
        with self._transfer.within:
            for tensor in tensors_of(self._cache, self._records):
                tensor.zero_()
            self._counts.zero_()

    def _warm_rounds(self) -> None:
        record = ingress(self.plan.shape)
        record["positions"] = -1
        record["source_slots"], record["target_slots"] = -1, 0
        for columns in _widths(self._model, self.plan.shape.width):
            record["columns"] = columns
            for rows in range(1, self.plan.shape.rows + 1):
                record["unit"], record["rows"] = Unit.ROUND, rows
                for _ in range(2):
                    self.run(record)
                if columns > 1:
                    record["unit"] = Unit.FOLD
                    self.run(record)

    def _prefill(self, columns: int, copy_source: int, copy_target: int) -> torch.Tensor | None:
        if copy_source >= 0:
            for pages in self._cache.kv:
                pages.copy(copy_source, copy_target)
        batch = self._batch(1, columns, extent=True)
        hidden = self._model.forward(batch, self._cache)
        if self._predict is not None:
            self._predict.follow(batch, hidden, *self._slots(0))
        if self.ingress["purpose"][0, 0] < 0:
            return None
        ops.clear_counts(self._count_rows(0), self._counts)
        drawn = self._draw(self._model.logits(hidden[-1:]), 1)
        if self._predict is not None:
            self._predict.propose(drawn.clamp(min=0), hidden[-1:], batch.positions[-1:], 1)
        return drawn

    def _count_rows(self, row: int) -> torch.Tensor:
        """Those of one row of a unit that isn't a round."""
        each = self.plan.shape.width if self._predict is not None else 1
        return self._fields["count_rows"][row * each : (row + 1) * each]

    def _slots(self, row: int) -> tuple[int, int]:
        """The source and the target of a row."""
        return int(self.ingress["source_slots"][0, row]), int(self.ingress["target_slots"][0, row])

    def _round(self, rows: int, columns: int) -> torch.Tensor:
        step = self._rounds.get((rows, columns))
        if step is None:
            step = ops.Recording(partial(self._step, rows, columns), self._device, self._pool)
            if self._graphs:
                self._rounds[rows, columns] = step
        if step.recorded:
            drawn, self._hidden = step()
        else:
            with torch.inference_mode():
                drawn, self._hidden = step()
        return drawn

    def _step(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward pass, scores and draws of a round, int32 `[rows * columns]`, and with drafts what follows
        from them; also the hidden states."""
        count = rows * columns
        batch = self._batch(rows, columns)
        hidden = self._model.forward(batch, self._cache, self._records if columns > 1 else None)
        logits = self._model.logits(hidden)
        counting = self._fields["count_rows"][:count], self._counts
        if self._predict is None:
            ops.count_tokens(batch.tokens, *counting)
        else:
            ops.count_drafts(batch.tokens, batch.positions, *counting, rows)
        drawn = self._draw(logits, count)
        if columns > 1:
            stand = self._stand[:rows]
            keeping = ()
            if self._predict is not None:
                keeping = *counting, hidden, self._cache.hidden, batch.target_slots
            following, kept, last = ops.accept(drawn, batch.tokens, batch.positions, stand, *keeping)
            self._advance(rows, stand)
            if self._predict is not None:
                accepted = replace(batch, tokens=following, positions=kept)
                self._predict.round(accepted, hidden, stand, last)
        return drawn, hidden

    def _draw(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """Draw from each row of scores, and say how likely that was where it was asked for."""
        masks, drawn = self._fields["masks"], self._drawn[:count]
        ops.draw(logits, self._draws(count), self._counts, masks, drawn)
        reports = (report[:count] for report in self._logprobs)
        ops.token_logprobs(logits, drawn, self._fields["logprobs"][:count], *reports)
        return drawn

    def _control(self, rows: int, columns: int) -> None:
        newest = []
        for row in range(rows):
            batch = self._batch(1, columns, row, extent=True)
            hidden = self._model.forward(batch, self._cache)
            if self._predict is not None:
                self._predict.follow(batch, hidden, *self._slots(row))
                newest.append((hidden[-1:], batch.positions[-1:]))
            for column in range(columns):
                count_rows = self._count_rows(row)
                token = batch.tokens[column : column + 1].expand(len(count_rows)).contiguous()
                ops.count_tokens(token, count_rows, self._counts)
        if self._predict is not None:
            hidden, positions = (torch.cat(parts) for parts in zip(*newest, strict=True))
            self._predict.propose(self._fields["waiting"][:rows], hidden, positions, rows)

    def _fold(self, rows: int) -> None:
        counts = self._fields["counts"][:rows]
        self._advance(rows, counts)
        if self._predict is not None and self._hidden is not None:
            self._predict.keep(self._hidden, counts)

    def _advance(self, rows: int, counts: torch.Tensor) -> None:
        assert self._records is not None, "a fold needs rounds of several columns"
        sources, targets = self._fields["source_slots"][:rows], self._fields["target_slots"][:rows]
        self._model.fold(self._cache, self._records, counts, sources, targets)

    def _batch(self, rows: int, columns: int, row: int = 0, *, extent: bool = False) -> Batch:
        """`rows` rows from `row` on; with an extent, which is not for what is recorded."""
        fields, begin, end = self._fields, row * columns, (row + rows) * columns
        return Batch(
            tokens=fields["tokens"][begin:end],
            positions=fields["positions"][begin:end],
            rows=rows,
            page_table=fields["page_table"][row : row + rows],
            source_slots=fields["source_slots"][row : row + rows],
            target_slots=fields["target_slots"][row : row + rows],
            extent=int(self.ingress["positions"][0, begin:end].max()) + 1 if extent else None,
        )

    def _draws(self, count: int) -> ops.Draws:
        f = self._fields
        return ops.Draws(
            temperature=f["temperature"][:count],
            top_p=f["top_p"][:count],
            min_p=f["min_p"][:count],
            presence=f["presence"][:count],
            frequency=f["frequency"][:count],
            top_k=f["top_k"][:count],
            seed=f["seed"][:count],
            position=f["draw_position"][:count],
            purpose=f["purpose"][:count],
            count_rows=f["count_rows"][:count],
            mask_row=f["mask_row"][:count],
        )
