"""The four models that the benchmarks train: what each one is built of, fed with and scored by.

===========  ==========================================  =========  ==========  =====================================
name         built of                                    tensors    parameters  what it shows
===========  ==========================================  =========  ==========  =====================================
mlp          5 x Linear(256, 256)                        10         0.33 M      fixed cost of one step
stress       1000 x Linear(8, 8)                         2000       0.07 M      cost of one parameter
resnet       ResNet-50's layout, base width 32, 64x64    161        6.0 M       many middling tensors, and buffers
transformer  12 pre-norm blocks of width 320             150        15.4 M      communication that outweighs the rest
===========  ==========================================  =========  ==========  =====================================
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step."""

    inputs: Tensor
    target: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on ``device``."""
        return Batch(self.inputs.to(device), self.target.to(device))


@dataclass(frozen=True)
class BenchmarkModel:
    """A model with its data and loss; the factories are cheap to pickle, the things they make are not."""

    make_module: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    block_steps: int  # timed steps of one block: enough to outlast the timer, few enough to alternate often
    blocks: int = 20  # more where a step is short, and noise so much larger beside it


# --- mlp ------------------------------------------------------------------------------------------------------------


def make_mlp() -> nn.Module:
    """Five linear layers, four of them followed by a ReLU."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 256))


def make_mlp_batch(generator: torch.Generator) -> Batch:
    """Thirty-two random vectors and what to regress them on."""
    return Batch(torch.randn(32, 256, generator=generator), torch.randn(32, 256, generator=generator))


# --- stress ---------------------------------------------------------------------------------------------------------


def make_stress() -> nn.Module:
    """A thousand tiny linear layers in a row: as good as no arithmetic, and 2000 gradients."""
    layers = [nn.Linear(8, 8) for _ in range(1000)]
    for layer in layers:
        # The usual initialisation shrinks a gradient by 0.6 a layer: most of them would be zeros or slow denormals.
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def make_stress_batch(generator: torch.Generator) -> Batch:
    """Eight random vectors and what to regress them on."""
    return Batch(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator))


# --- resnet ---------------------------------------------------------------------------------------------------------

_EXPANSION = 4
_RESNET_CLASSES = 100


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride) and 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.body = nn.Sequential(
            _conv_norm(inputs, width, 1),
            nn.ReLU(inplace=True),
            _conv_norm(width, width, 3, stride),
            nn.ReLU(inplace=True),
            _conv_norm(width, outputs, 1),
        )
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else _conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Body plus shortcut."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def make_resnet() -> nn.Module:
    """ResNet-50's layout (3, 4, 6, 3 bottlenecks) at half its width."""
    base = 32
    layers: list[nn.Module] = [_conv_norm(3, base, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = base
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = base * 2**stage
        for index in range(depth):
            layers.append(Bottleneck(inputs, width, stride=2 if stage > 0 and index == 0 else 1))
            inputs = width * _EXPANSION
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _RESNET_CLASSES)]
    return nn.Sequential(*layers)


def make_resnet_batch(generator: torch.Generator) -> Batch:
    """Eight random 64x64 images and their classes."""
    images = torch.randn(8, 3, 64, 64, generator=generator)
    return Batch(images, torch.randint(_RESNET_CLASSES, (8,), generator=generator))


# --- transformer ----------------------------------------------------------------------------------------------------

_VOCABULARY = 900
_CONTEXT = 64
_WIDTH = 320
_HEADS = 5


class Block(nn.Module):
    """Causal self-attention and a feed-forward part, each after its norm: 12 parameter tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.projection = nn.Linear(_WIDTH, _WIDTH)
        self.forward_norm = nn.LayerNorm(_WIDTH)
        self.expand = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.contract = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Both parts, each added to what it read."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, _WIDTH))
        out: Tensor = x + self.contract(F.gelu(self.expand(self.forward_norm(x))))
        return out


class Transformer(nn.Module):
    """A decoder-only language model with learned positions and an output layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position's next token."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def make_transformer_batch(generator: torch.Generator) -> Batch:
    """Two sequences of random tokens, each position's target being the token that follows."""
    tokens = torch.randint(_VOCABULARY, (2, _CONTEXT + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


MODELS: dict[str, BenchmarkModel] = {
    "mlp": BenchmarkModel(make_mlp, make_mlp_batch, F.mse_loss, learning_rate=1e-2, block_steps=30, blocks=100),
    "stress": BenchmarkModel(make_stress, make_stress_batch, F.mse_loss, learning_rate=1e-4, block_steps=15),
    "resnet": BenchmarkModel(make_resnet, make_resnet_batch, F.cross_entropy, learning_rate=1e-2, block_steps=10),
    "transformer": BenchmarkModel(
        Transformer, make_transformer_batch, next_token_loss, learning_rate=1e-2, block_steps=10
    ),
}
