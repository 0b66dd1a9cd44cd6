// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policystatus

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sluice-net/sluice/services/policy/evaluation"
)

func TestVerdictsNameTheFieldAndWhatIsDone(t *testing.T) {
	var unsupported, canonical, without, many evaluation.Notes
	unsupported.Unsupported("spec.egress[0].toServices", "services as peers; the rule allows nothing")
	canonical.Add(evaluation.NoteCanonical, "spec.ingress[0]", "taken as 192.0.2.0/24")
	without.Add(evaluation.NoteNoEffect, "spec.log", "has no effect")
	for range 100 {
		many.Unsupported("spec.egress[0].toServices", "%s", strings.Repeat("ä", 100))
	}
	isolates := evaluation.Notes{{
		Kind: evaluation.NoteIsolates, Text: "cannot be converted; what it selects is isolated: x",
	}}
	const policies, groups = "CiliumNetworkPolicy", "CiliumCIDRGroup"
	for _, c := range []struct {
		name, kind string
		judged     evaluation.Outcome
		want       Verdict
	}{
		{
			"as written", policies,
			evaluation.Outcome{InForce: true},
			Verdict{Reason: Accepted, Message: "enforced as written"},
		},
		{
			"a group", groups,
			evaluation.Outcome{InForce: true},
			Verdict{Reason: Accepted, Message: "policies select its addresses"},
		},
		{
			"another spelling", policies,
			evaluation.Outcome{InForce: true, Notes: canonical},
			Verdict{Reason: Accepted, Message: "enforced as written: spec.ingress[0]: taken as 192.0.2.0/24"},
		},
		{
			"a field without effect", policies,
			evaluation.Outcome{InForce: true, Notes: without},
			Verdict{Reason: Accepted, Message: "enforced as written: spec.log: has no effect"},
		},
		{
			"a dropped field", policies,
			evaluation.Outcome{InForce: true, Dropped: []string{"extra"}},
			Verdict{Reason: Accepted, Message: "enforced as written: extra: no such field; it is ignored"},
		},
		{"not supported", policies, evaluation.Outcome{InForce: true, Notes: unsupported}, Verdict{
			Reason: ConvertedToClosed,
			Message: "accepted, with fields that are not supported: " +
				"spec.egress[0].toServices: not supported by Sluice: services as peers; the rule allows nothing",
		}},
		{
			"isolates", policies,
			evaluation.Outcome{InForce: true, Broken: "spec.x: no such field", Notes: isolates},
			Verdict{Reason: Refused, Message: "what it selects is isolated: spec.x: no such field"},
		},
		{
			"exceeds a share", policies,
			evaluation.Outcome{
				InForce: true, Exceeds: "exceeds the share of namespace shop of limits.policies (3)", Notes: isolates,
			},
			Verdict{
				Reason:  ExceedsShare,
				Message: "what it selects is isolated: exceeds the share of namespace shop of limits.policies (3)",
			},
		},
		{
			"refused", policies,
			evaluation.Outcome{InForce: true, Refused: "belongs to the source file"},
			Verdict{
				Reason:  Refused,
				Message: "nodes enforce what they had of it before, or nothing: belongs to the source file",
			},
		},
		{
			"a bad group", groups,
			evaluation.Outcome{Refused: "spec.externalCIDRs[0]: is no prefix"},
			Verdict{Reason: Refused, Message: "policies that name it select what it had before, or nothing: " +
				"spec.externalCIDRs[0]: is no prefix"},
		},
	} {
		if got := Judge(c.kind, c.judged); got != c.want {
			t.Errorf("%s: %+v\nwant %+v", c.name, got, c.want)
		}
	}
	long := Judge(policies, evaluation.Outcome{InForce: true, Notes: many})
	if len(long.Message) > maxMessage || len(long.Message) < maxMessage-4 || !utf8.ValidString(long.Message) ||
		!strings.HasSuffix(long.Message, "…") {
		t.Errorf("a long message has %d bytes and ends with %q", len(long.Message), long.Message[len(long.Message)-8:])
	}
}

func TestConditionsAreMergedByType(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	const (
		before = `"lastTransitionTime":"2026-01-01T00:00:00Z"`
		valid  = `{"type":"Valid","status":"True","unknown":{"to":"us"}}`
		ours   = `{"type":"sluice.io/Accepted","status":"True","observedGeneration":3,` + before +
			`,"reason":"Accepted","message":"m"}`
		fresh = `{"type":"sluice.io/Accepted","status":"True","observedGeneration":3,` +
			`"lastTransitionTime":"2026-11-27T12:00:00Z","reason":"Accepted","message":"m"}`
	)
	as := func(old, with string) string { return strings.Replace(ours, old, with, 1) }
	for _, c := range []struct{ name, have, want string }{ // want is empty: no write
		{"none", ``, `[` + fresh + `]`},
		{"null", `null`, `[` + fresh + `]`},
		{"empty", `[]`, `[` + fresh + `]`},
		{"others alone", `[` + valid + `]`, `[` + valid + `,` + fresh + `]`},
		{"said already", `[` + ours + `,` + valid + `]`, ``},
		{"already set, by a schema without generations", `[` + as(`"observedGeneration":3,`, ``) + `]`, ``},
		{"of another generation", `[` + as(`:3,`, `:2,`) + `,` + valid + `]`, `[` + ours + `,` + valid + `]`},
		{"another message", `[` + as(`"m"`, `"n"`) + `]`, `[` + ours + `]`},
		{"another reason", `[` + as(`"reason":"Accepted"`, `"reason":"ConvertedToClosed"`) + `]`, `[` + ours + `]`},
		{"another status", `[` + as(`"True"`, `"False"`) + `]`, `[` + fresh + `]`},
		{"another's text is kept", `[1,"text",` + valid + `]`, `[1,"text",` + valid + `,` + fresh + `]`},
	} {
		got, err := merge([]byte(c.have), Verdict{Reason: Accepted, Message: "m"}, 3, now)
		if err != nil || string(got) != c.want {
			t.Errorf("%s: %s gives\n%s (%v)\nwant\n%s", c.name, c.have, got, err, c.want)
		}
		if len(got) == 0 {
			continue
		}
		again, err := merge(got, Verdict{Reason: Accepted, Message: "m"}, 3, now.Add(time.Hour))
		if again != nil || err != nil {
			t.Errorf("%s: written again: %s (%v)", c.name, again, err)
		}
	}
	if got, err := merge([]byte(`{}`), Verdict{Reason: Accepted, Message: "m"}, 3, now); got != nil || err == nil {
		t.Errorf("conditions that are not a list give %s and no error", got)
	}
}

func TestEventsAreNamedByWhatIsNews(t *testing.T) {
	o := Object{Key: evaluation.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: strings.Repeat("a-b.", 60)}}
	o.UID, o.Generation = "u", 3
	v := Verdict{Reason: Refused, Message: strings.Repeat("ä", 1000)}
	first := event(o, v)
	if len(first.Name) > 253 || len(first.Note) > maxNote || !utf8.ValidString(first.Note) || !first.Warning ||
		first.Reason != "PolicyRefused" {
		t.Errorf("got %+v", first)
	}
	for what, change := range map[string]func(*Object, *Verdict) bool{ // each reports whether a new Event is expected
		"nothing":          func(*Object, *Verdict) bool { return false },
		"resource version": func(o *Object, _ *Verdict) bool { o.ResourceVersion = "9"; return false },
		"figures":          func(_ *Object, v *Verdict) bool { v.Message = "other"; return false },
		"generation":       func(o *Object, _ *Verdict) bool { o.Generation++; return true },
		"another object":   func(o *Object, _ *Verdict) bool { o.UID = "w"; return true },
		"reason":           func(_ *Object, v *Verdict) bool { v.Reason = ConvertedToClosed; return true },
	} {
		o, v := o, v
		if news := change(&o, &v); (event(o, v).Name != first.Name) != news {
			t.Errorf("%s causes an Event: %t, want %t", what, !news, news)
		}
	}
}
