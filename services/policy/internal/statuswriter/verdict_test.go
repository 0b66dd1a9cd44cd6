// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package statuswriter

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
)

func TestVerdictsNameTheFieldAndWhatIsDone(t *testing.T) {
	var unsupported, canonical, many manifest.Notes
	unsupported.Unsupported("spec.egress[0].toServices", "services as peers; the rule allows nothing")
	canonical.Add(manifest.NoteCanonical, "spec.ingress[0]", "taken as 192.0.2.0/24")
	for range 100 {
		many.Unsupported("spec.egress[0].toServices", "%s", strings.Repeat("ä", 100))
	}
	isolates := manifest.Notes{{Kind: manifest.NoteIsolates, Text: "cannot be converted; what it selects is isolated: x"}}
	const policies, groups = "CiliumNetworkPolicy", "CiliumCIDRGroup"
	for _, c := range []struct {
		name, kind string
		judged     owner.Judged
		want       Verdict
	}{
		{"as written", policies, owner.Judged{InForce: true}, Verdict{Accepted, "enforced as written"}},
		{"a group", groups, owner.Judged{InForce: true}, Verdict{Accepted, "policies select its addresses"}},
		{
			"another spelling", policies,
			owner.Judged{InForce: true, Notes: canonical},
			Verdict{Accepted, "enforced as written: spec.ingress[0]: taken as 192.0.2.0/24"},
		},
		{
			"a dropped field", policies,
			owner.Judged{InForce: true, Dropped: []string{"extra"}},
			Verdict{Accepted, "enforced as written: extra: no such field; it is ignored"},
		},
		{"not supported", policies, owner.Judged{InForce: true, Notes: unsupported}, Verdict{
			ConvertedToClosed,
			"accepted, with fields that are not supported: spec.egress[0].toServices: not supported by Sluice: services as peers; the rule allows nothing",
		}},
		{
			"isolates", policies,
			owner.Judged{InForce: true, Broken: "spec.x: no such field", Notes: isolates},
			Verdict{Refused, "what it selects is isolated: spec.x: no such field"},
		},
		{
			"no room", policies,
			owner.Judged{InForce: true, Refused: "there would be 3 policies"},
			Verdict{Refused, "nodes enforce what they had of it before, or nothing: there would be 3 policies"},
		},
		{
			"a bad group", groups,
			owner.Judged{Refused: "spec.externalCIDRs[0]: is no prefix"},
			Verdict{Refused, "policies that name it select what it had before, or nothing: spec.externalCIDRs[0]: is no prefix"},
		},
	} {
		if got := Judge(c.kind, c.judged); got != c.want {
			t.Errorf("%s: %+v\nwant %+v", c.name, got, c.want)
		}
	}
	long := Judge(policies, owner.Judged{InForce: true, Notes: many})
	if len(long.Message) > maxMessage || len(long.Message) < maxMessage-4 || !utf8.ValidString(long.Message) || !strings.HasSuffix(long.Message, "…") {
		t.Errorf("a long message has %d bytes and ends with %q", len(long.Message), long.Message[len(long.Message)-8:])
	}
}

func TestConditionsAreMergedByType(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	const (
		before = `"lastTransitionTime":"2026-01-01T00:00:00Z"`
		valid  = `{"type":"Valid","status":"True","unknown":{"to":"us"}}`
		ours   = `{"type":"sluice.io/Accepted","status":"True","observedGeneration":3,` + before + `,"reason":"Accepted","message":"m"}`
		fresh  = `{"type":"sluice.io/Accepted","status":"True","observedGeneration":3,` +
			`"lastTransitionTime":"2026-11-27T12:00:00Z","reason":"Accepted","message":"m"}`
	)
	as := func(old, with string) string { return strings.Replace(ours, old, with, 1) }
	for _, c := range []struct{ name, have, want string }{ // want "": no write
		{"none", ``, `[` + fresh + `]`},
		{"null", `null`, `[` + fresh + `]`},
		{"empty", `[]`, `[` + fresh + `]`},
		{"others alone", `[` + valid + `]`, `[` + valid + `,` + fresh + `]`},
		{"said already", `[` + ours + `,` + valid + `]`, ``},
		{"said, by a schema without generations", `[` + as(`"observedGeneration":3,`, ``) + `]`, ``},
		{"of another generation", `[` + as(`:3,`, `:2,`) + `,` + valid + `]`, `[` + ours + `,` + valid + `]`},
		{"another message", `[` + as(`"m"`, `"n"`) + `]`, `[` + ours + `]`},
		{"another reason", `[` + as(`"reason":"Accepted"`, `"reason":"ConvertedToClosed"`) + `]`, `[` + ours + `]`},
		{"another status", `[` + as(`"True"`, `"False"`) + `]`, `[` + fresh + `]`},
		{"another's text is kept", `[1,"text",` + valid + `]`, `[1,"text",` + valid + `,` + fresh + `]`},
	} {
		got, err := merge([]byte(c.have), Verdict{Accepted, "m"}, 3, now)
		if err != nil || string(got) != c.want {
			t.Errorf("%s: %s gives\n%s (%v)\nwant\n%s", c.name, c.have, got, err, c.want)
		}
		if len(got) == 0 {
			continue
		}
		if again, err := merge(got, Verdict{Accepted, "m"}, 3, now.Add(time.Hour)); again != nil || err != nil {
			t.Errorf("%s: written again: %s (%v)", c.name, again, err)
		}
	}
	if got, err := merge([]byte(`{}`), Verdict{Accepted, "m"}, 3, now); got != nil || err == nil {
		t.Errorf("conditions that are no list give %s and no error", got)
	}
}
