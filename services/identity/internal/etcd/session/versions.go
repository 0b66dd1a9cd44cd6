// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
)

// rolesHold has the first patch version of each minor version of etcd that enforces the roles of nodes. Earlier
// versions do not check nested transactions (CVE-2026-33343: every key can be written), leases and compactions
// (CVE-2026-33413), leases of puts in transactions (CVE-2026-44283), or open-ended watches (CVE-2026-73499: every key
// can be read). Minor versions after the last one have all fixes; minor versions before the first one never get them.
var rolesHold = []version{{3, 5, 33}, {3, 6, 14}, {3, 7, 1}}

// version is major, minor and patch of etcd.
type version [3]int

// holds reports whether an etcd of this version limits nodes to their roles.
func (v version) holds() bool {
	for _, first := range rolesHold {
		if v[0] == first[0] && v[1] == first[1] {
			return v[2] >= first[2]
		}
	}
	return slices.Compare(v[:], rolesHold[len(rolesHold)-1][:]) > 0
}

// parseVersion parses "3.6.14" and "3.7.0-rc.0"; a version before a release counts as the patch before it, -1 if it
// is a minor version's first.
func parseVersion(text string) (v version, err error) {
	number, pre, isPre := strings.Cut(text, "-")
	if _, err := fmt.Sscanf(number, "%d.%d.%d", &v[0], &v[1], &v[2]); err != nil {
		return version{}, fmt.Errorf("version %q of etcd: %w", text, err)
	}
	if isPre && pre != "" {
		v[2]--
	}
	return v, nil
}

// Roles records whether etcd enforces the roles of nodes. The zero value has no result.
type Roles struct {
	mu      sync.Mutex
	members map[string]string // guarded by mu; endpoint → version, of the members that do not enforce roles
}

// Err returns an error with the members that do not enforce the roles of nodes; nil if every member that answered does,
// or nodes have no roles.
func (r *Roles) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.members) == 0 {
		return nil
	}
	var all []string
	for endpoint, version := range r.members {
		all = append(all, fmt.Sprintf("%s (%s)", endpoint, version))
	}
	slices.Sort(all)
	var fixed []string
	for _, v := range rolesHold {
		fixed = append(fixed, fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]))
	}
	return fmt.Errorf("roles of etcd do not limit nodes in this version (CVE-2026-33343): %s; update to %s or later",
		strings.Join(all, ", "), strings.Join(fixed, ", "))
}

// rolesInterval is the interval of the requests for the versions of members.
const rolesInterval = 5 * time.Minute

// CheckRoles asks the members for their versions at intervals until ctx is done. A session that has neither a
// certificate nor a user name has no role, so it does not ask.
func (s *Session) CheckRoles(ctx context.Context, r *Roles) error {
	if s.cfg.Client.Cert == "" && s.cfg.Client.Username == "" {
		<-ctx.Done()
		return nil
	}
	for {
		s.checkRoles(ctx, r)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rolesInterval):
		}
	}
}

// checkRoles asks each member once. For a member that does not answer, the last version stays.
func (s *Session) checkRoles(ctx context.Context, r *Roles) {
	has, err := s.hasRoles(ctx)
	if err != nil {
		s.cfg.Log.Debug("asking etcd whether nodes have roles", log.Err(err))
		return
	}
	for _, endpoint := range s.Endpoints() {
		old := ""
		if has {
			text, v, err := s.versionOf(ctx, endpoint)
			if err != nil {
				s.cfg.Log.Debug("asking etcd for its version", "endpoint", endpoint, log.Err(err))
				continue
			}
			if !v.holds() {
				old = text
			}
		}
		r.set(endpoint, old)
	}
}

// set records the version of a member that does not enforce roles; empty if it does.
func (r *Roles) set(endpoint, old string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if old == "" {
		delete(r.members, endpoint)
		return
	}
	if r.members == nil {
		r.members = map[string]string{}
	}
	r.members[endpoint] = old
}

// hasRoles reports whether authentication is enabled. It returns true for etcd 3.4, which has no call to read that.
func (s *Session) hasRoles(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	resp, err := s.client.AuthStatus(ctx)
	switch {
	case err == nil:
		return resp.Enabled, nil
	case errors.Is(err, rpctypes.ErrPermissionDenied): // if authentication is enabled, only root may ask
		return true, nil
	case status.Code(err) == codes.Unimplemented:
		return true, nil
	default:
		return false, err
	}
}

// versionOf asks a member for its version.
func (s *Session) versionOf(ctx context.Context, endpoint string) (string, version, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	resp, err := s.client.Status(ctx, endpoint)
	if err != nil {
		return "", version{}, err
	}
	v, err := parseVersion(resp.Version)
	return resp.Version, v, err
}
