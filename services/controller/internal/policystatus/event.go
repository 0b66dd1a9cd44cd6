// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystatus

import (
	"crypto/sha256"
	"fmt"
	"strings"

	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

// maxNote limits the text of an Event, in bytes.
const maxNote = 1024

// Event informs the author of an object that has no status.
type Event struct {
	// Name depends on the object, its generation and the reason only. If a process does not know whether it has
	// created the Event, it creates the Event again, and the API server keeps the existing one. When the Event has
	// expired, by default after an hour, it is created again.
	Name    string
	Reason  string
	Note    string
	Warning bool
}

// event returns the Event for a verdict.
func event(o Object, v Verdict) Event {
	e := Event{
		Reason: "Policy" + v.Reason, Note: subject.Shorten(v.Message, maxNote),
		Warning: v.Reason != Accepted || v.Partial,
	}
	what := v.Reason
	switch {
	case v.Partial:
		e.Reason, what = "PolicyEnforcedPartly", what+" partly"
	case v.Reason == ExceedsShare:
		e.Reason = ExceedsShare
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %s", o.UID, o.Generation, what))
	const most = 200 // a name has at most 253 characters including the suffix
	e.Name = fmt.Sprintf("%s.%x", strings.TrimRight(o.Name[:min(len(o.Name), most)], "-."), sum[:8])
	return e
}
