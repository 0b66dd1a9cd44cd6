// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package instance defines the paths and user IDs of an instance of Sluice.
//
// Several instances may run on one machine. Each has a name, which is part of every directory that
// it owns. The package only computes paths: it creates no directory and opens no file.
package instance

import (
	"errors"
	"fmt"
	"path/filepath"
)

// Numeric user IDs and group ID of the processes. They need no passwd entry; deploy/sysusers.d has the same numbers for
// machines that want names. They are above all ranges from which systemd and Debian allocate users, and below the
// subordinate IDs.
const (
	GroupID uint32 = 65700 // group of every process and of every permitted reader

	FirstServiceID uint32 = 65701
	LastServiceID  uint32 = 65799

	IdentityID     = FirstServiceID
	IPAMID         = FirstServiceID + 1
	PolicyID       = FirstServiceID + 2
	LoadBalancerID = FirstServiceID + 3
	EtcdID         = FirstServiceID + 4 // etcd of a development node; its group has the same number
	DatapathID     = FirstServiceID + 5
	ControllerID   = FirstServiceID + 6 // the name of the user is still sluice-status, as in earlier versions
	HTTPID         = FirstServiceID + 7
	HubbleID       = FirstServiceID + 8
	DNSID          = FirstServiceID + 9
	StoreID        = FirstServiceID + 11
)

// Names of the sockets for proxies in the directory of the sockets of sluice-datapath.
const (
	ProxySocketName     = "proxy.sock" // for sluice-dns
	HTTPProxySocketName = "proxy-http.sock"
)

// ListenersSocketName is the name of the socket in the same directory by which sluice-datapath keeps the listening
// sockets of sluice-loadbalancer while that restarts.
const ListenersSocketName = "listeners.sock"

// ErrName is returned for an instance or service name that is not allowed in a path.
var ErrName = errors.New("invalid name")

// isName reports whether s is 1 to 32 characters of a-z, 0-9 and "-" and does not begin with "-".
// It avoids regexp because the CNI plugin, which runs for a few milliseconds, links this package:
// compiling the pattern took a quarter of a millisecond.
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
	ConfigDir string // files <service>.yaml
	StateDir  string // state that survives a reboot; one directory per service
	BPFDir    string // the instance's own bpffs; the machine's, /sys/fs/bpf, is accessible to root only
}

// New returns the directories of an instance; the empty name is the default instance. A name is 1
// to 32 characters of a-z, 0-9 and "-" and does not begin with "-".
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

// Under returns the same instance with all directories moved below root, for tests and unprivileged
// runs.
func (p Paths) Under(root string) Paths {
	p.RunDir = filepath.Join(root, p.RunDir)
	p.ConfigDir = filepath.Join(root, p.ConfigDir)
	p.StateDir = filepath.Join(root, p.StateDir)
	p.BPFDir = filepath.Join(root, p.BPFDir)
	return p
}

// CheckService returns an error if a service name is not allowed in a path.
func CheckService(service string) error {
	if !isName(service) || !isLetter(service[0]) {
		return fmt.Errorf("service %q: %w: want 1 to 32 of a-z, 0-9 and \"-\", beginning with a letter", service, ErrName)
	}
	return nil
}

// ServiceRunDir returns the directory of the service's sockets.
func (p Paths) ServiceRunDir(service string) string { return filepath.Join(p.RunDir, service) }

// Socket returns the path of the service's gRPC socket.
func (p Paths) Socket(service string) string {
	return filepath.Join(p.RunDir, service, service+".sock")
}

// ProxySocket returns the path of the socket on which sluice-datapath hands the queue of the TAP device, and the proxy
// namespace, to sluice-dns.
func (p Paths) ProxySocket() string {
	return filepath.Join(p.ServiceRunDir("datapath"), ProxySocketName)
}

// HTTPProxySocket returns the path of the socket on which sluice-datapath hands the proxy namespace to sluice-http.
func (p Paths) HTTPProxySocket() string {
	return filepath.Join(p.ServiceRunDir("datapath"), HTTPProxySocketName)
}

// ListenersSocketBeside returns the path of the socket by which sluice-datapath keeps listening sockets, for a service
// of the same instance whose gRPC socket has the given path.
func ListenersSocketBeside(socket string) string {
	return filepath.Join(filepath.Dir(filepath.Dir(socket)), "datapath", ListenersSocketName)
}

// MetricsSocket returns the path of the unix socket on which the service serves its metrics over
// HTTP.
func (p Paths) MetricsSocket(service string) string {
	return filepath.Join(p.RunDir, service, "metrics.sock")
}

// ConfigFile returns the path of the service's configuration file; it need not exist.
func (p Paths) ConfigFile(service string) string {
	return filepath.Join(p.ConfigDir, service+".yaml")
}

// ServiceStateDir returns the service's writable directory.
func (p Paths) ServiceStateDir(service string) string { return filepath.Join(p.StateDir, service) }
