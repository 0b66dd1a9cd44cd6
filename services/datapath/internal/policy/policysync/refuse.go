// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// refuse looks for steps that this process does not know. From the first unknown step on, no message of the stream is
// applied, because an omitted step may be a deny rule. The kernel keeps enforcing its current state. Only removed
// identities become unknown, because their numbers may be reused.
func (a *Applier) refuse(w *work, m policytable.Message) ([]policystream.Nack, error) {
	if a.refused == "" {
		for i, st := range m.Steps {
			unknown, ok := st.(policytable.UnknownStep)
			if !ok {
				continue
			}
			a.forgetStream() // the next stream has to begin with a snapshot
			a.refused = fmt.Sprintf("message %d, steps[%d]: this datapath does not know step %d of the policy service and keeps enforcing its current policies; upgrade the datapath", m.Seq, i, unknown.Field)
			a.setHeld(a.refused)
			a.log.Error("policies not adopted", "reason", a.refused)
			select {
			case <-a.synced:
			default:
				close(a.synced) // the service sends nothing newer by itself
			}
			break
		}
	}
	if a.refused == "" {
		return nil, nil
	}
	var ended []uint32
	for _, st := range m.Steps {
		if st, ok := st.(policytable.SetIdentity); ok && st.IdentityClass == 0 {
			ended = append(ended, uint32(st.Identity))
		}
	}
	return []policystream.Nack{{Seq: m.Seq, Reason: a.refused}}, a.makeUnknown(w, ended)
}

// refusing reports whether the messages of the stream are not applied.
func (a *Applier) refusing() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refused != ""
}
