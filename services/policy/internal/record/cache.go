// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"fmt"

	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

// keyNamedPorts1 is the former key of workload.KeyNamedPorts, in version 1 of the cache and in the first format.
const keyNamedPorts1 = "io.cilium.k8s.named-ports"

// rename replaces the former key of the named ports in the labels of an identity.
func rename(x Identity) (Identity, bool) {
	renamed := false
	for i, l := range x.Labels {
		if l[0] == label.SourceGenerated && l[1] == keyNamedPorts1 {
			x.Labels[i][1], renamed = workload.KeyNamedPorts, true
		}
	}
	return x, renamed
}

// migrateCache migrates the identities of version 1.
func migrateCache(t *store.Tx, _ uint32) error {
	changed := map[string]Identity{}
	if err := t.ForEach(bucketIdentities, func(k, v []byte) error {
		var x Identity
		if err := decode(v, &x); err != nil {
			return fmt.Errorf("%s %.100q: %w", bucketIdentities, k, err)
		}
		if x, renamed := rename(x); renamed {
			changed[string(k)] = x
		}
		return nil
	}); err != nil {
		return err
	}
	for k, x := range changed {
		t.Put(bucketIdentities, []byte(k), encode(x))
	}
	return nil
}
