// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package filter

import (
	"fmt"
	"regexp"
	"regexp/syntax"
	"slices"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// maxExpression limits the regular expressions of one filter. It is the number of instructions of the compiled
// expressions, as estimated by size. Without the limit, a short expression such as (.{1000}){1000} would take many
// megabytes.
const maxExpression = 5_000

// queries adds the condition for the name of a DNS message: one of the regular expressions must match.
func (b *builder) queries(texts []string) error {
	if len(texts) == 0 {
		return nil
	}
	all := make([]*regexp.Regexp, 0, len(texts))
	total := 0
	for _, text := range texts {
		tree, err := syntax.Parse(text, syntax.Perl)
		if err != nil {
			return err
		}
		if total += size(tree, maxExpression); total > maxExpression {
			return fmt.Errorf("%.100q is too large, together with the expressions before it", text)
		}
		compiled, err := regexp.Compile(text)
		if err != nil {
			return err
		}
		all = append(all, compiled)
	}
	b.add(func(f *flow.Flow) bool {
		dns := f.GetL7().GetDns()
		return dns != nil && slices.ContainsFunc(all, func(x *regexp.Regexp) bool { return x.MatchString(dns.GetQuery()) })
	})
	return nil
}

// size estimates the number of instructions of a compiled expression. If the number exceeds most, size returns any
// number above most.
func size(x *syntax.Regexp, most int) int {
	n := 1 + len(x.Rune)
	for _, sub := range x.Sub {
		if n += size(sub, most); n > most {
			return n
		}
	}
	if x.Op == syntax.OpRepeat {
		n *= max(x.Min, x.Max, 1)
	}
	return n
}
