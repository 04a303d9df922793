"""Decoder: one class for all families; a family is a config.

Shapes: T rows of a step, R rows with logits, D hidden size, V vocabulary, P positions.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.attention import NativeAttend
from specinfer.kernels.decoder import NativeDecoder, NativeLayers, Places
from specinfer.kernels.low_rank import AdaptedLayer
from specinfer.kernels.product import Product, first_channels
from specinfer.models.config import ModelConfig
from specinfer.models.decoder_layer import DecoderLayer
from specinfer.models.language_model import LanguageModel, PassContext, PassOutput, Residual, check_taps
from specinfer.models.layers import RowNorm, embedding_and_output, rope_embeddings, rotations, turns
from specinfer.models.per_layer import PerLayerInputs
from specinfer.models.shared_sums import TableOnDisk
from specinfer.models.weight_memory import Weights


class Decoder(LanguageModel):
    """A decoder-only transformer, whose hidden states heads can read.

    A native call computes a pass, with the bits of `embed`, `run_layers` and `final_norm`.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        stage = config.stage
        # The largest matrices come first: temporary copies of them are freed before the layers are read.
        self.table, self.output = embedding_and_output(config, weights, "model.embed_tokens")
        # transformers rounds Gemma's scale to the model's dtype, also in training.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self._places: Places | None = None
        if config.learned_positions and stage.begins:
            self._places = Places(weights.tensor("model.embed_positions.weight"), config.position_offset)
        self._final_norm = RowNorm.of("model.norm", config, weights)
        self._per_layer: PerLayerInputs | None = None
        if config.per_layer is not None:
            self._per_layer = PerLayerInputs(config, config.per_layer, weights)
        self._ropes = rope_embeddings(config, self.device)
        # True if logits need operations after the product of the output layer.
        self._changes_logits = config.logit_scale != 1.0 or config.logit_softcap is not None
        self._layers: Iterable[DecoderLayer] = weights.each(
            lambda i: self.layer_class(i, config, weights, f"model.layers.{stage.first + i}"),
            config.num_layers,
        )
        native: NativeLayers | None = None
        if self.stream is None and not config.op_by_op:  # a single call cannot wait for weights
            native = NativeLayers.of([layer.parts for layer in self._layers], weights.kernels.ops)
        self._native: NativeDecoder | None = None
        if native is not None:
            looks_up = stage.begins  # otherwise each call passes embedding rows
            self._native = NativeDecoder(
                native,
                self.table.whole if looks_up else None,
                self._embedding_scale if looks_up else 1.0,
                dtype=self.dtype,
                places=self._places if looks_up else None,
                norm=self._final_norm.parts,
                output=self.output,
                rotations=(len(self._ropes), partial(rotations, self._ropes, config.max_context)),
                writing=config.num_layers - config.shared_layers,
            )

    @property
    def embedding(self) -> tuple[Tensor, float]:
        """The embedding table [V, D], read if it is on disk, and its factor; ranks must not divide it."""
        whole = self.table.whole
        if isinstance(self.table, TableOnDisk):
            whole, _ = self.table.rows(torch.arange(self.config.vocab_size))
        assert whole is not None, "the whole table is needed"
        return whole, self._embedding_scale

    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        max_logits: int = 0,
        stage_input_TD: Tensor | None = None,
    ) -> PassOutput:
        """A whole pass up to the head; see LanguageModel."""
        attend, stage = context.attend, self.config.stage
        if self._native is None or not isinstance(attend, NativeAttend) or not token_ids_T.numel():
            return self.read_by_layers(token_ids_T, context, rows, stage_input_TD)
        check_taps(context.taps, stage)
        if self._changes_logits:
            max_logits = 0  # the native call computes the product alone
        taps = [tap - stage.first for tap in context.taps]
        per_layer_TC = self._per_layer_inputs(token_ids_T)
        if not stage.ends:  # the output of the last layer here goes to the next stage
            taps.append(self.config.num_layers)
            rows, max_logits = token_ids_T[:0], 0
        embedding_ND = None
        if stage_input_TD is not None:  # looked up in place of embeddings
            embedding_ND, token_ids_T = stage_input_TD, torch.arange(len(stage_input_TD))
        elif self.table.whole is None:
            embedding_ND, token_ids_T = self.table.rows(token_ids_T)
        hidden_RD, tapped_TND, logits_RV = self._native(
            *(token_ids_T, context.positions_T, rows, attend, taps, max_logits, embedding_ND),
            adapted=context.adapted,
            states=context.states,
            per_layer_TC=per_layer_TC,
        )
        if stage.ends or tapped_TND is None:
            return PassOutput(hidden_RD, tapped_TND, logits_RV)
        stage_output_TD = tapped_TND[:, -1].contiguous()
        tapped_TND = tapped_TND[:, :-1].contiguous() if context.taps else None
        return PassOutput(hidden_RD, tapped_TND, stage_output_TD=stage_output_TD)

    def read_by_layers(
        self, token_ids_T: Tensor, context: PassContext, rows: Tensor | None, stage_input_TD: Tensor | None
    ) -> PassOutput:
        """As `read`, without the native call."""
        if stage_input_TD is None:
            residual = self.embed(token_ids_T, context.positions_T)
        else:
            residual = Residual(stage_input_TD)
        residual, tapped_TND = self.run_layers(residual, context, self._per_layer_inputs(token_ids_T))
        if self.config.stage.ends:
            return PassOutput(self.final_norm(residual, rows), tapped_TND)
        stage_output_TD = residual.summed()
        return PassOutput(stage_output_TD[:0], tapped_TND, stage_output_TD=stage_output_TD)

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Residual:
        """The input of the first layer.

        Both are int64 [T]; a position is the token's place in its text.
        """
        rows_ND, places_T = self.table.rows(token_ids_T)
        x_TD = self.kernels.ops.embed(places_T, rows_ND, self._embedding_scale)
        if self._places is not None:
            x_TD += F.embedding(positions_T + self._places.offset, self._places.table_PD)
        return Residual(x_TD)

    def _per_layer_inputs(self, token_ids_T: Tensor) -> Tensor | None:
        """The inputs of all layers beside the residual stream, [T, C]; None if there are none."""
        if self._per_layer is None:
            return None
        rows_ND, places_T = self.table.rows(token_ids_T)
        embedded_TD = self.kernels.ops.embed(places_T, rows_ND, self._embedding_scale)
        return self._per_layer(token_ids_T, embedded_TD)

    def run_layers(
        self, residual: Residual, context: PassContext, per_layer_TC: Tensor | None = None
    ) -> tuple[Residual, Tensor | None]:
        """The output of the layers for `residual`, and the inputs of tapped layers, [T, N, D].

        Tap i is hidden_states[i] in transformers' counting, before layer i's first norm; the number of layers
        means the last layer's output. Layers of a stage are numbered as in the whole model. Overwrites the
        tensors of `residual`.
        """
        stage, taps = self.config.stage, context.taps
        check_taps(taps, stage)
        tapped_TND = residual.x_TD.new_empty(len(residual.x_TD), len(taps), residual.x_TD.shape[1])

        def see(layer: int, residual: Residual) -> None:
            """Copy the input of a tapped layer."""
            for place, wanted in enumerate(taps):
                if wanted == layer:
                    tapped_TND[:, place] = residual.summed()

        turned = turns(self._ropes, context.positions_T)
        for i, layer in enumerate(self._layers, start=stage.first):
            see(i, residual)
            adapted = AdaptedLayer.of(context.adapted, i - stage.first)
            given = turned[layer.parts.rope], context.attend, adapted, context.states
            y_TD = layer(residual.x_TD, residual.y_TD, *given, per_layer_TC)
            residual = Residual(residual.x_TD, y_TD)
        see(stage.end, residual)
        return residual, tapped_TND if taps else None

    def final_norm(self, residual: Residual, rows: Tensor | None = None) -> Tensor:
        """The head's input for these rows (int64; None: all), [R, D]; `residual` is unchanged."""
        return self._final_norm.of_sum(residual.x_TD, residual.y_TD, rows)

    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of rows of `final_norm`, [R, V]; see LanguageModel."""
        return self._logits_of(self.output, h_RD)

    def first_logits(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """See LanguageModel."""
        output = None if self.group is not None else first_channels(self.output, count)
        return None if output is None else partial(self._logits_of, output)

    def _logits_of(self, output: Product, h_RD: Tensor) -> Tensor:
        logits_RV = output(h_RD)
        if self.config.logit_scale != 1.0:
            logits_RV = logits_RV * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits_RV if cap is None else torch.tanh(logits_RV / cap) * cap
