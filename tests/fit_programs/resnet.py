"""A ResNet-50 as torchvision writes it, made on the GPU and compiled; `… [channels_last]`."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        inside, stages = 64, []
        for count, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
            blocks = []
            for index in range(count):
                blocks.append(Bottleneck(inside, width, stride if index == 0 else 1))
                inside = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.layers, self.pool, self.fc = (
            nn.Sequential(*stages),
            nn.AdaptiveAvgPool2d(1),
            nn.Linear(2048, 1000),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 1)
                nn.init.constant_(module.bias, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.layers(self.stem(x))).flatten(1))


with torch.device("cuda"):
    model = ResNet()
form = torch.channels_last if "channels_last" in sys.argv else torch.contiguous_format
model = model.to(memory_format=form)
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
for step in range(3):
    x, y = torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))
    with torch.autocast("cuda", torch.bfloat16):
        out = compiled(x.cuda(non_blocking=True).to(memory_format=form))
        loss = F.cross_entropy(out, y.cuda(), label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    right = (out.argmax(1) == y.cuda()).float().mean()
    print(f"{step} {loss.item():.3f} {right.item():.3f}")
