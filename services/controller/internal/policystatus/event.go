// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystatus

import (
	"crypto/sha256"
	"fmt"
	"strings"
)

// maxNote is how many bytes the text of an Event may have.
const maxNote = 1024

// Event is what an author is told of an object without a status.
type Event struct {
	// Name is the same for the same reason and the same generation of the same
	// object: a process that does not know whether it was said makes the Event again,
	// and the API server keeps the one that there is. Once that has expired, after an
	// hour by default, it is said again.
	Name    string
	Reason  string
	Note    string
	Warning bool
}

// event is that of a verdict.
func event(o Object, v Verdict) Event {
	e := Event{Reason: "Policy" + v.Reason, Note: shorten(v.Message, maxNote), Warning: v.Reason != Accepted || v.Partial}
	what := v.Reason
	switch {
	case v.Partial:
		e.Reason, what = "PolicyEnforcedPartly", what+" partly"
	case v.Reason == ExceedsShare:
		e.Reason = ExceedsShare
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %s", o.UID, o.Generation, what))
	const most = 200 // of the name, which has at most 253 with what follows
	e.Name = fmt.Sprintf("%s.%x", strings.TrimRight(o.Name[:min(len(o.Name), most)], "-."), sum[:8])
	return e
}

// shorten cuts a text to so many bytes.
func shorten(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	const more = "…"
	return strings.ToValidUTF8(text[:limit-len(more)], "") + more
}
