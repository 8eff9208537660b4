"""The opening of a masked sum: shares are taken in, secrets rebuilt from exactly t, and the masks removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from mycelia.aggregator.cohort import Cohort
from mycelia.privacy.secagg import keys, masks, shamir
from mycelia.privacy.secagg.keys import AgreementKey, ShareKind
from mycelia.privacy.secagg.masks import Words
from mycelia.privacy.secagg.messages import SEALED_BYTES, TAG_BYTES, Reason, SecureSumError, Unmask
from mycelia.privacy.secagg.round_config import RoundConfig

__all__ = ["Dealt", "Unmasking"]


class Dealt(NamedTuple):
    """What one client shared.

    Attributes:
        commitment: to its self seed.
        fields: of each neighbour: sealed shares, and the tags of both.
    """

    commitment: bytes
    fields: tuple[bytes, ...]


class Unmasking:
    """The shares of one session.

    Args:
        config: of the round.
        cohort: whose shares they are, with U1 and U2 set.
        dealt: what each client shared.
        mask_keys: the public mask key of each client.

    Attributes:
        short: owners of whose secret fewer than t shares are here.
    """

    def __init__(
        self,
        config: RoundConfig,
        cohort: Cohort,
        dealt: Mapping[int, Dealt],
        mask_keys: Mapping[int, bytes],
    ) -> None:
        self._config, self._cohort, self._dealt, self._mask_keys = config, cohort, dealt, mask_keys
        self._shares: dict[int, dict[int, bytes]] = {owner: {} for owner in cohort.sharers}
        self.short = len(cohort.sharers)

    def take(self, client: int, unmask: Unmask) -> Iterator[int]:
        """Take a client's shares; gives the owner of each that is not the one dealt, and is not kept.

        Raises:
            SecureSumError: `SHARE_MISMATCH`: not as many as it was asked for; none is kept.
        """
        alive, silent = self._cohort.split(client)
        sent = len(unmask.b_shares), len(unmask.s_shares)
        if sent != (len(alive), len(silent)):
            raise SecureSumError(
                Reason.SHARE_MISMATCH,
                f"{sent[0]} and {sent[1]} shares",
                rule=f"{len(alive)} and {len(silent)}",
            )
        return self._keep(
            client, ((ShareKind.B, alive, unmask.b_shares), (ShareKind.S, silent, unmask.s_shares))
        )

    def _keep(
        self, client: int, kinds: tuple[tuple[ShareKind, list[int], tuple[bytes, ...]], ...]
    ) -> Iterator[int]:
        for kind, owners, sent in kinds:
            start = SEALED_BYTES + TAG_BYTES * kind
            for owner, share in zip(owners, sent, strict=True):
                holder = self._cohort.places[owner][client]
                dealt = self._dealt[owner].fields[holder - 1][start : start + TAG_BYTES]
                if keys.share_tag(self._config.session_id, owner, holder, kind, share) == dealt:
                    shares = self._shares[owner]
                    shares[holder] = share
                    self.short -= len(shares) == self._cohort.t
                else:
                    yield owner

    def count(self, owner: int) -> int:
        """How many shares of an owner's secret are here."""
        return len(self._shares[owner])

    def open(self, total: Words) -> None:
        """Take all masks off the sum, in place.

        Args:
            total: the masked sum over U2.

        Raises:
            SecureSumError: `SHARE_MISMATCH`: good shares rebuild something else than their owner announced.
        """
        self._remove_masks(self._rebuild(), total)

    def _rebuild(self) -> dict[int, bytes]:
        """Of each owner b or s, from exactly t shares, and checked against what the owner announced."""
        t = self._cohort.t
        owners = sorted(self._shares)
        chosen = [sorted(self._shares[owner])[:t] for owner in owners]
        joined = b"".join(
            self._shares[owner][holder] for owner, row in zip(owners, chosen, strict=True) for holder in row
        )
        shares = np.frombuffer(joined, ">u4").astype(np.uint32).reshape(len(owners), t, shamir.LIMBS)
        holders = np.array(chosen, np.int64)
        try:
            rebuilt = [secret.tobytes() for secret in shamir.combine(shares, holders, owners)]
        except SecureSumError as error:
            raise _misdealt(error.owner) from error
        for owner, secret in zip(owners, rebuilt, strict=True):
            if owner in self._cohort.survivors:
                found = keys.commitment(self._config.session_id, owner, secret)
                fits = found == self._dealt[owner].commitment
            else:
                fits = AgreementKey(secret).public == self._mask_keys[owner]
            if not fits:
                raise _misdealt(owner)
        return dict(zip(owners, rebuilt, strict=True))

    def _remove_masks(self, secrets: Mapping[int, bytes], total: Words) -> None:
        session_id, survivors = self._config.session_id, self._cohort.survivors
        streams, signs = [], []
        for owner, secret in secrets.items():
            if owner in survivors:
                streams.append(keys.kdf(secret, session_id, "sa1/self", owner, owner))
                signs.append(-1)
                continue
            key = AgreementKey(secret)
            for other in self._cohort.near[owner]:
                if other in survivors:  # its vector has + towards the larger id
                    agreed = key.agree(self._mask_keys[other], other)
                    streams.append(keys.kdf(agreed, session_id, "sa1/pair", owner, other))
                    signs.append(-1 if owner > other else 1)
        masks.add_streams(total, streams, signs, self._config.bits)


def _misdealt(owner: int | None) -> SecureSumError:
    return SecureSumError(
        Reason.SHARE_MISMATCH,
        "the secret is not the one its owner announced",
        rule="shares with good tags rebuild the secret that was committed to",
        phase="unmask",
        owner=owner,
    )
