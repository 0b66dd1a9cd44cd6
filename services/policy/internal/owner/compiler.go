// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
)

// compiler passes changes to the engine, and records which tables lack rules. It belongs to the loop.
type compiler struct {
	engine     *engine.Engine
	problems   *problem.Set
	identities *identities
	interests  *interests
}

// apply passes a change to the engine. The engine refuses a change only if it exceeds a limit.
func (c *compiler) apply(change engine.Change) error {
	err := c.engine.Apply(change)
	c.noteReduced()
	if err != nil {
		return fmt.Errorf("%w: %w", failure.ErrLimit, err)
	}
	return nil
}

// addSubjects compiles subjects whose identities are known. If a table would be too large, it gets only the rules that
// fit.
func (c *compiler) addSubjects(list []identity.Numeric) {
	var fresh []identity.Numeric
	for _, x := range list {
		if _, known := c.identities.all[x]; known && !c.engine.IsSubject(x) && c.interests.want(x) {
			fresh = append(fresh, x)
		}
	}
	if len(fresh) > 0 {
		c.problems.Note("subjects", c.apply(engine.Change{AddSubjects: fresh}))
	}
}

// noteReduced records the subjects whose tables lack rules.
func (c *compiler) noteReduced() {
	list := c.engine.Reduced()
	if len(list) == 0 {
		c.problems.Note("tables", nil)
		return
	}
	c.problems.Note("tables", fmt.Errorf("%d policy tables lack some of their rules; the first: %s", len(list),
		list[0]))
}
