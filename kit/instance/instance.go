// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package instance says where one copy of the system keeps its files.
//
// Several copies may run side by side on one machine; each has a name, and
// the name is part of every directory it owns. The package computes paths and
// nothing else: it creates no directory and opens no file.
package instance

import (
	"errors"
	"fmt"
	"path/filepath"
)

// Numeric users and the group of the processes. No passwd entry is needed;
// deploy/sysusers.d has the same numbers for machines that want one. They lie
// above every range from which systemd and Debian hand out users, and below the
// subordinate ids.
const (
	GroupID uint32 = 65700 // every process and every permitted reader is a member

	FirstServiceID uint32 = 65701
	LastServiceID  uint32 = 65799

	IdentityID     = FirstServiceID
	IPAMID         = FirstServiceID + 1
	PolicyID       = FirstServiceID + 2
	LoadBalancerID = FirstServiceID + 3
	EtcdID         = FirstServiceID + 4 // of a development node's etcd, which has a group of the same number
	DatapathID     = FirstServiceID + 5
	ControllerID   = FirstServiceID + 6 // its user has the name sluice-status, as in earlier versions
)

// ErrName is returned for an instance or service name that cannot be part of a path.
var ErrName = errors.New("invalid name")

// isName says whether s is 1 to 32 of a-z, 0-9 and "-", not beginning with "-". It is a
// loop because the CNI plugin, which lives for a few milliseconds, links this package:
// compiling the pattern took a quarter of one.
func isName(s string) bool {
	for i := range len(s) {
		if c := s[i]; !isLetter(c) && (c < '0' || c > '9') && (c != '-' || i == 0) {
			return false
		}
	}
	return s != "" && len(s) <= 32
}

func isLetter(c byte) bool { return c >= 'a' && c <= 'z' }

// Paths are the directories of one instance.
type Paths struct {
	Name      string // empty for the default instance
	RunDir    string // sockets; one directory per service below it
	ConfigDir string // <service>.yaml files
	StateDir  string // what must survive a reboot; one directory per service
	BPFDir    string // a bpffs of the instance's own: the machine's, /sys/fs/bpf, is root's alone
}

// New returns the directories of the instance of that name; the empty name is
// the default instance. A name is 1 to 32 characters of a-z, 0-9 and "-" and
// does not begin with "-".
func New(name string) (Paths, error) {
	suffix := ""
	if name != "" {
		if !isName(name) {
			return Paths{}, fmt.Errorf("instance %q: %w: want 1 to 32 of a-z, 0-9 and \"-\", not beginning with \"-\"", name, ErrName)
		}
		suffix = "-" + name
	}
	return Paths{
		Name:      name,
		RunDir:    "/run/sluice" + suffix,
		ConfigDir: "/etc/sluice" + suffix,
		StateDir:  "/var/lib/sluice" + suffix,
		BPFDir:    "/run/sluice" + suffix + "/bpf",
	}, nil
}

// Under returns the same instance with every directory moved below root,
// which is how tests and unprivileged runs keep off the machine's own.
func (p Paths) Under(root string) Paths {
	p.RunDir = filepath.Join(root, p.RunDir)
	p.ConfigDir = filepath.Join(root, p.ConfigDir)
	p.StateDir = filepath.Join(root, p.StateDir)
	p.BPFDir = filepath.Join(root, p.BPFDir)
	return p
}

// CheckService says whether a service name can be part of a path.
func CheckService(service string) error {
	if !isName(service) || !isLetter(service[0]) {
		return fmt.Errorf("service %q: %w: want 1 to 32 of a-z, 0-9 and \"-\", beginning with a letter", service, ErrName)
	}
	return nil
}

// ServiceRunDir is the directory that holds the service's sockets.
func (p Paths) ServiceRunDir(service string) string { return filepath.Join(p.RunDir, service) }

// Socket is the service's gRPC socket.
func (p Paths) Socket(service string) string {
	return filepath.Join(p.RunDir, service, service+".sock")
}

// MetricsSocket is where the service answers HTTP requests for its metrics.
func (p Paths) MetricsSocket(service string) string {
	return filepath.Join(p.RunDir, service, "metrics.sock")
}

// ConfigFile is the service's configuration file; it need not exist.
func (p Paths) ConfigFile(service string) string {
	return filepath.Join(p.ConfigDir, service+".yaml")
}

// ServiceStateDir is the service's writable directory.
func (p Paths) ServiceStateDir(service string) string { return filepath.Join(p.StateDir, service) }
