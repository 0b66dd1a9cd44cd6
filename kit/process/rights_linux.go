// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/privilege"
)

// Option changes how Run runs a service.
type Option func(*rights)

// Privileged is for a service that needs capabilities: it keeps exactly these.
// Started as root, it becomes that user with the group of all services before
// it opens anything; started as another user, it must have been given them as
// ambient ones.
func Privileged(uid uint32, caps ...privilege.Cap) Option {
	return func(r *rights) { r.uid, r.capabilities = uid, caps }
}

// rights are what a service keeps of what it was started with. The zero value
// needs none.
type rights struct {
	uid          uint32
	capabilities []privilege.Cap
}

// take gives up everything else.
func (r rights) take(log *slog.Logger) error {
	if len(r.capabilities) == 0 {
		return privilege.Unprivileged(log)
	}
	if os.Geteuid() == 0 {
		return privilege.Become(r.uid, instance.GroupID, r.capabilities...)
	}
	if err := privilege.NoNewPrivs(); err != nil {
		return err
	}
	if err := privilege.KeepCapabilities(r.capabilities...); err != nil {
		return errors.Join(err, fmt.Errorf("start it as uid %d with ambient capabilities %s, or as root with these, CAP_SETUID and CAP_SETGID",
			r.uid, privilege.SetOf(r.capabilities...)))
	}
	return nil
}

// hasRights says whether the process may do what others may not: what it does
// for a caller, the caller can do. It is replaced by tests.
var hasRights = func() bool {
	if os.Geteuid() == 0 {
		return true
	}
	state, err := privilege.Current()
	return err != nil || state.Permitted != 0
}
