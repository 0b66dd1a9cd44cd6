// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// refuse looks for steps that this process does not know. From the first one on,
// no message of the stream is carried out: a step that is left out may be the
// one that denies. The kernel goes on enforcing what it enforces, but for
// identities that end: their numbers may be given out again.
func (a *Applier) refuse(w *work, m policytable.Message) ([]policystream.Nack, error) {
	if a.refused == "" {
		for i, st := range m.Steps {
			unknown, ok := st.(policytable.UnknownStep)
			if !ok {
				continue
			}
			a.forgetStream() // the next one has to begin with everything
			a.refused = fmt.Sprintf("message %d, steps[%d]: step %d of the policy service is not known to this datapath, which goes on enforcing what it enforced: update it", m.Seq, i, unknown.Field)
			a.setHeld(a.refused)
			a.log.Error("policies not taken over", "reason", a.refused)
			select {
			case <-a.synced:
			default:
				close(a.synced) // nothing better comes by itself
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

// refusing says whether the stream is not carried out.
func (a *Applier) refusing() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refused != ""
}
