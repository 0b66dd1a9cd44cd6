// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystatus

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-net/sluice/services/controller/internal/subject"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Reasons of a verdict. They are part of the interface: scripts and alerts refer to them.
const (
	Accepted          = "Accepted"
	ConvertedToClosed = "ConvertedToClosed"
	Refused           = "Refused"
	ExceedsShare      = "ExceedsShare"
)

// conditionType is specific to Sluice. Conditions of other types, such as Cilium's Valid, are left alone.
const conditionType = "sluice.io/Accepted"

// maxMessage limits a message, in bytes. The API server accepts 32768.
const maxMessage = 2048

// Verdict is the result of evaluating one object.
type Verdict struct {
	Reason  string
	Message string // at most maxMessage bytes
	// Partial reports that some nodes do not enforce the policy as written, or may not.
	Partial bool
}

// Judge returns the verdict for the author of an object. `sluice policy list` uses the same texts.
func Judge(kind string, j evaluation.Outcome) Verdict {
	var parts []string
	for _, n := range j.Notes {
		if n.Kind != evaluation.NoteIsolates { // Broken has the reason
			parts = append(parts, n.String())
		}
	}
	if n := j.Notes.Omitted(); n > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", n))
	}
	for _, path := range j.Dropped {
		parts = append(parts, path+": no such field; it is ignored")
	}
	switch {
	case j.Refused != "":
		then := "nodes enforce what they had of it before, or nothing"
		if kind == groupKind {
			then = "policies that name it select what it had before, or nothing"
		}
		return newVerdict(Refused, then, []string{j.Refused})
	case j.Exceeds != "":
		then := "what it selects is isolated"
		if kind == groupKind {
			then = closedGroup
		}
		return newVerdict(ExceedsShare, then, append([]string{j.Exceeds}, parts...))
	case j.Broken != "":
		then := "what it selects is isolated"
		if kind == groupKind {
			then = closedGroup
		}
		return newVerdict(Refused, then, append([]string{j.Broken}, parts...))
	}
	for _, n := range j.Notes {
		if n.Kind == evaluation.NoteUnsupported {
			return newVerdict(ConvertedToClosed, "accepted, with fields that are not supported", parts)
		}
	}
	if kind == groupKind {
		return newVerdict(Accepted, "policies select its addresses", parts)
	}
	return newVerdict(Accepted, "enforced as written", parts)
}

const closedGroup = "deny rules that name it apply to every address, allow rules to none of it"

// groupKind is the kind of objects without rules that policies refer to.
const groupKind = "CiliumCIDRGroup"

func newVerdict(reason, what string, parts []string) Verdict {
	text := what
	if len(parts) > 0 {
		text += ": " + strings.Join(parts, "; ")
	}
	return Verdict{Reason: reason, Message: subject.Shorten(text, maxMessage)}
}

// Nodes describes the nodes that do not enforce a policy as written.
type Nodes struct {
	Names  string // names of at most ten of the nodes
	Count  int
	All    int // number of nodes in the cluster
	Reason string
	// Unknown has names of at most ten of the UnknownCount nodes on which the state of the policy is unknown: they do
	// not report this policy, but their reports omit policies. Omitted is a lower bound of the number of omitted
	// policies.
	Unknown               string
	UnknownCount, Omitted int
	// Reasons has the reason codes of the omitted policies, each with a lower bound of its number; empty: unknown.
	Reasons string
	// Unreadable has names of at most ten of the UnreadableCount nodes whose reports cannot be read.
	Unreadable      string
	UnreadableCount int
}

// on returns the verdict, extended by the information which nodes do not enforce the policy.
func (v Verdict) on(n Nodes) Verdict {
	others := n.Count + n.UnknownCount + n.UnreadableCount
	if others == 0 || v.Reason != Accepted && v.Reason != ConvertedToClosed {
		return v
	}
	text := fmt.Sprintf("enforced on %d of %d nodes", max(0, n.All-others), max(n.All, others))
	switch {
	case n.Count == others:
		text += fmt.Sprintf("; on the others (%s) what does not fit is closed: %s", n.Names, n.Reason)
	case n.Count > 0:
		text += fmt.Sprintf("; on %s (%s) what does not fit is closed: %s", nodes(n.Count), n.Names, n.Reason)
	}
	if n.UnknownCount > 0 {
		reasons := n.Reasons
		if reasons != "" {
			reasons = " (at least " + reasons + ")"
		}
		text += fmt.Sprintf("; unknown on %s (%s): at least %d policies that are not enforced as written%s do not fit "+
			"into the report; `sluice policy list` there names them", nodes(n.UnknownCount), n.Unknown, n.Omitted, reasons)
	}
	if n.UnreadableCount > 0 {
		text += fmt.Sprintf("; unknown on %s (%s): the reports of these nodes in etcd cannot be read; "+
			"`sluice policy list` there shows whether this policy is enforced", nodes(n.UnreadableCount), n.Unreadable)
	}
	v.Message, v.Partial = subject.Shorten(text+"; "+v.Message, maxMessage), true
	return v
}

func nodes(count int) string {
	if count == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", count)
}

// status returns the status of the condition for the verdict's reason.
func (v Verdict) status() string {
	if v.Reason == Refused || v.Reason == ExceedsShare {
		return "False"
	}
	return "True"
}

// condition is a metav1.Condition.
type condition struct {
	Type               string `json:"type"`
	Status             string `json:"status"`
	ObservedGeneration int64  `json:"observedGeneration,omitempty"`
	LastTransitionTime string `json:"lastTransitionTime"`
	Reason             string `json:"reason"`
	Message            string `json:"message"`
}

// merge adds the verdict on a generation to the conditions of an object. It returns nil if they contain it already.
// Conditions of other types are kept byte for byte.
func merge(conditions []byte, v Verdict, generation int64, now time.Time) ([]byte, error) {
	var all []json.RawMessage
	if len(conditions) > 0 {
		if err := json.Unmarshal(conditions, &all); err != nil {
			return nil, fmt.Errorf("status.conditions: %w", err)
		}
	}
	next := condition{
		Type: conditionType, Status: v.status(), ObservedGeneration: generation,
		LastTransitionTime: now.UTC().Format(time.RFC3339), Reason: v.Reason, Message: v.Message,
	}
	at := len(all)
	for i, raw := range all {
		var c condition
		if err := json.Unmarshal(raw, &c); err != nil || c.Type != conditionType {
			continue // a condition of another controller, even if it is malformed
		}
		at = i
		if c.Status == next.Status {
			next.LastTransitionTime = c.LastTransitionTime
		}
		// Cilium's schema has no observedGeneration. An API server with this schema drops the field. If the field
		// were compared, the write would be repeated for ever.
		same := next
		if c.ObservedGeneration == 0 {
			same.ObservedGeneration = 0
		}
		if c == same {
			return nil, nil
		}
		break
	}
	text, err := json.Marshal(next)
	if err != nil {
		return nil, err
	}
	if at == len(all) {
		all = append(all, nil)
	}
	all[at] = text
	out, err := json.Marshal(all)
	if err == nil && bytes.Equal(out, conditions) {
		return nil, nil
	}
	return out, err
}
