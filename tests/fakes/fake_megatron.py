"""What `dpipe.baselines.megatron` uses of megatron-core 0.16.1, for one rank: its paths,
signatures, names and layouts.

As Megatron does, it keeps q, k and v of a head side by side, gives a loss for each token, scales
the mean of a micro-batch in place, and leaves learning rate and decay of each group to who steps.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class TransformerConfig:
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    params_dtype: torch.dtype = torch.float32
    pipeline_dtype: torch.dtype | None = None
    bf16: bool = False
    fp16: bool = False
    deallocate_pipeline_outputs: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    use_cpu_initialization: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    finalize_model_grads_func: Callable[[list[nn.Module]], None] | None = None


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.linear_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self._num_heads = config.num_attention_heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.linear_qkv(x).unflatten(-1, (self._num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.linear_proj(y.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, config: TransformerConfig, number: int) -> None:
        super().__init__()
        self.layer_number, width = number, config.hidden_size
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention, self.mlp = _Attention(config), nn.Module()
        self.mlp.linear_fc1, self.mlp.linear_fc2 = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x), mask)
        return x + self.mlp.linear_fc2(F.gelu(self.mlp.linear_fc1(self.pre_mlp_layernorm(x))))


def _layers(config: TransformerConfig) -> nn.ModuleList:
    return nn.ModuleList(_Layer(config, number + 1) for number in range(config.num_layers))


class GPTModel(nn.Module):
    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: str,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        vp_stage: int | None = None,
    ) -> None:
        super().__init__()
        assert (transformer_layer_spec, position_embedding_type) == ("local", "learned_absolute")
        assert (
            pre_process
            and post_process
            and not share_embeddings_and_output_weights
            and vp_stage is None
        )
        self.config, width = config, config.hidden_size
        self.embedding, self.decoder = nn.Module(), nn.Module()
        self.embedding.word_embeddings = nn.Embedding(vocab_size, width)
        self.embedding.position_embeddings = nn.Embedding(max_sequence_length, width)
        self.decoder.layers = _layers(config)
        self.decoder.final_layernorm = nn.LayerNorm(width)
        self.output_layer = nn.Linear(width, vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        x = self.embedding.word_embeddings(input_ids) + self.embedding.position_embeddings(
            position_ids
        )
        for layer in self.decoder.layers:
            x = layer(x)
        logits = self.output_layer(self.decoder.final_layernorm(x))
        return _losses(logits, labels)


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


class BertModel(nn.Module):
    """Its attention is masked for positions that lie behind the end, too; a shared table is the
    embedding's alone.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: str,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        vp_stage: int | None = None,
    ) -> None:
        super().__init__()
        assert (transformer_layer_spec, position_embedding_type) == ("local", "learned_absolute")
        assert pre_process and post_process and vp_stage is None
        self.config, width = config, config.hidden_size
        self.embedding, self.encoder, self.lm_head, self.pooler = (nn.Module() for _ in range(4))
        self.embedding.word_embeddings = nn.Embedding(vocab_size, width)
        self.embedding.position_embeddings = nn.Embedding(max_sequence_length, width)
        self.embedding.tokentype_embeddings = nn.Embedding(num_tokentypes, width)
        self.encoder.layers = _layers(config)
        self.encoder.final_layernorm = nn.LayerNorm(width)
        self.lm_head.dense, self.lm_head.layer_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.output_layer = nn.Linear(width, vocab_size)
        if share_embeddings_and_output_weights:
            self.output_layer.weight = None
        self.binary_head, self.pooler.dense = nn.Linear(width, 2), nn.Linear(width, width)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        tokentype_ids: torch.Tensor,
        lm_labels: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(input_ids.shape[1])
        x = self.embedding.word_embeddings(input_ids) + self.embedding.position_embeddings(
            positions
        )
        x = x + self.embedding.tokentype_embeddings(tokentype_ids)
        both = attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2)
        mask = torch.where(both, 0.0, -10000.0).unsqueeze(1)
        for layer in self.encoder.layers:
            x = layer(x, mask)
        x = self.encoder.final_layernorm(x)
        words, table = (
            self.lm_head.layer_norm(F.gelu(self.lm_head.dense(x))),
            self.output_layer.weight,
        )
        logits = F.linear(
            words,
            self.embedding.word_embeddings.weight if table is None else table,
            self.output_layer.bias,
        )
        return _losses(logits, lm_labels), self.binary_head(torch.tanh(self.pooler.dense(x[:, 0])))


class Float16Module(nn.Module):
    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__()
        self.module = module.to(torch.bfloat16 if config.bf16 else torch.float16)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.module(*args, **kwargs)


@dataclass
class DistributedDataParallelConfig:
    grad_reduce_in_fp32: bool = False
    use_distributed_optimizer: bool = False


class DistributedDataParallel(nn.Module):
    """Sums gradients where the optimizer reads them; they stay until `zero_grad_buffer`."""

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
    ) -> None:
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def finalize_model_grads(model: list[nn.Module]) -> None:
    for parameter in model[0].parameters():
        assert parameter.grad is not None


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable[
        [Iterator[Any], nn.Module], tuple[torch.Tensor, Callable[..., Any]]
    ],
    data_iterator: Iterator[Any],
    model: DistributedDataParallel,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    losses_reduced, config = [], model.config
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, model)
        losses = output[0] if isinstance(output, tuple) else output
        assert losses.shape == (micro_batch_size, seq_length)
        loss, reduced = loss_func(output)
        loss /= num_microbatches
        losses_reduced.append(reduced)
        config.grad_scale_func(loss).backward()
    config.finalize_model_grads_func([model])
    return losses_reduced


@dataclass
class OptimizerConfig:
    optimizer: str = "adam"
    lr: float | None = None
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    clip_grad: float = 1.0
    params_dtype: torch.dtype = torch.float32
    bf16: bool = False
    fp16: bool = False
    initial_loss_scale: float = 2**32
    loss_scale_window: float = 1000
    hysteresis: int = 2
    use_distributed_optimizer: bool = False


class FP32Optimizer:
    def __init__(self, config: OptimizerConfig, parameters: list[nn.Parameter]) -> None:
        betas, self._config, self._parameters = (
            (config.adam_beta1, config.adam_beta2),
            config,
            parameters,
        )
        groups = [
            {
                "params": [p for p in parameters if (p.ndim > 1) is decays],
                "wd_mult": float(decays),
                "lr_mult": 1.0,
            }
            for decays in (True, False)
        ]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, weight_decay=0.0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._adam.param_groups

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def step(self) -> tuple[bool, float, None]:
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._config.clip_grad))
        self._adam.step()
        return True, norm, None


def get_megatron_optimizer(
    config: OptimizerConfig, model_chunks: list[nn.Module], use_gloo_process_groups: bool = True
) -> FP32Optimizer:
    return FP32Optimizer(config, list(model_chunks[0].parameters()))


class ParallelState:
    """`called` is what the groups were last asked to be."""

    def __init__(self) -> None:
        self.called: dict[str, Any] = {}

    def initialize_model_parallel(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        order: str = "tp-cp-ep-dp-pp",
        create_gloo_process_groups: bool = True,
    ) -> None:
        self.called = {
            "tensor": tensor_model_parallel_size,
            "pipeline": pipeline_model_parallel_size,
            "virtual": virtual_pipeline_model_parallel_size,
            "order": order,
        }


def install(monkeypatch: pytest.MonkeyPatch) -> ParallelState:
    """`import megatron.core` finds this."""
    state = ParallelState()
    modules: dict[str, dict[str, Any]] = {
        "": {},
        ".core": {},
        ".core.models": {},
        ".core.parallel_state": {"initialize_model_parallel": state.initialize_model_parallel},
        ".core.transformer": {"TransformerConfig": TransformerConfig},
        ".core.transformer.module": {"Float16Module": Float16Module},
        ".core.models.gpt": {"GPTModel": GPTModel},
        ".core.models.gpt.gpt_layer_specs": {"get_gpt_layer_local_spec": lambda: "local"},
        ".core.models.bert": {},
        ".core.models.bert.bert_model": {"BertModel": BertModel},
        ".core.models.bert.bert_layer_specs": {"bert_layer_local_spec": "local"},
        ".core.distributed": {
            "DistributedDataParallel": DistributedDataParallel,
            "DistributedDataParallelConfig": DistributedDataParallelConfig,
            "finalize_model_grads": finalize_model_grads,
        },
        ".core.pipeline_parallel": {
            "get_forward_backward_func": lambda: forward_backward_no_pipelining
        },
        ".core.optimizer": {
            "OptimizerConfig": OptimizerConfig,
            "get_megatron_optimizer": get_megatron_optimizer,
        },
    }
    for name, content in modules.items():
        module = ModuleType(f"megatron{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"megatron{name}", module)
    return state
