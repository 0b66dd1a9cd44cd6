// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package controlplane writes the certificates and returns the command lines of a Kubernetes control plane.
package controlplane

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-net/sluice/test/k8s/internal/pki"
	"github.com/sluice-net/sluice/test/k8s/internal/wait"
)

// The cluster's address ranges, IPv4 first. All clusters use the same ranges, because each has separate network
// namespaces.
const (
	PodCIDRs     = "10.244.0.0/16,fd00:244::/48"
	ServiceCIDRs = "10.96.0.0/16,fd00:96::/108"
	// DNSAddress is the service address of the cluster's DNS server.
	DNSAddress = "10.96.0.10"
	// firstService is the address of the service default/kubernetes.
	firstService = "10.96.0.1"
)

// Plane is a control plane.
type Plane struct {
	// Binaries is the directory of the Kubernetes programs.
	Binaries string
	// Version of kube-apiserver, such as 1.33. If it is empty, kube-apiserver has the version of the other programs.
	Version string
	// Dir contains the certificates and kubeconfig files.
	Dir string
	// Address and Port serve the API.
	Address string
	Port    int
	// Etcd is the URL of etcd.
	Etcd string
}

// Server is the URL of the API.
func (p Plane) Server() string {
	return fmt.Sprintf("https://%s", net.JoinHostPort(p.Address, fmt.Sprint(p.Port)))
}

func (p Plane) file(name string) string { return filepath.Join(p.Dir, name) }

// Prepare writes the certificates and kubeconfig files of the administrator and of the components.
func (p Plane) Prepare(authority *pki.Authority) error {
	// authority writes to p.Dir.
	return errors.Join(
		authority.Issue("apiserver", pkix.Name{CommonName: "kube-apiserver"},
			p.Address, "127.0.0.1", firstService, "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"),
		authority.Issue("apiserver-kubelet",
			pkix.Name{CommonName: "kube-apiserver", Organization: []string{"system:masters"}}),
		authority.Key("service-account"),
		authority.Kubeconfig("admin", p.Server(), "admin", "system:masters"),
		authority.Kubeconfig("controller-manager", p.Server(), "system:kube-controller-manager"),
		authority.Kubeconfig("scheduler", p.Server(), "system:kube-scheduler"),
	)
}

// APIServer returns the command line of kube-apiserver. Features that tests do not use, such as audit and
// aggregation, are off.
func (p Plane) APIServer() []string {
	return []string{
		filepath.Join(p.Binaries, strings.TrimSuffix("kube-apiserver-"+p.Version, "-")),
		"--advertise-address=" + p.Address, "--bind-address=" + p.Address, fmt.Sprintf("--secure-port=%d", p.Port),
		"--etcd-servers=" + p.Etcd,
		"--service-cluster-ip-range=" + ServiceCIDRs,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--client-ca-file=" + p.file("ca.crt"),
		"--tls-cert-file=" + p.file("apiserver.crt"), "--tls-private-key-file=" + p.file("apiserver.key"),
		"--kubelet-client-certificate=" + p.file("apiserver-kubelet.crt"),
		"--kubelet-client-key=" + p.file("apiserver-kubelet.key"),
		// No name server resolves the names of nodes.
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + p.file("service-account.key"),
		"--service-account-signing-key-file=" + p.file("service-account.key"),
		"--profiling=false",
	}
}

// ControllerManager is the command line of kube-controller-manager.
func (p Plane) ControllerManager() []string {
	return []string{
		filepath.Join(p.Binaries, "kube-controller-manager"),
		"--kubeconfig=" + p.file("controller-manager.kubeconfig"), "--bind-address=127.0.0.1",
		"--allocate-node-cidrs=true", "--cluster-cidr=" + PodCIDRs,
		"--service-account-private-key-file=" + p.file("service-account.key"), "--root-ca-file=" + p.file("ca.crt"),
		"--use-service-account-credentials=true", "--leader-elect=false", "--profiling=false",
	}
}

// Scheduler is the command line of kube-scheduler.
func (p Plane) Scheduler() []string {
	return []string{
		filepath.Join(p.Binaries, "kube-scheduler"),
		"--kubeconfig=" + p.file("scheduler.kubeconfig"), "--bind-address=127.0.0.1",
		"--leader-elect=false", "--profiling=false",
	}
}

// WaitReady returns when the API is ready, as seen from the caller's network namespace, or after the timeout. The
// file contains the certificate of the authority.
func (p Plane) WaitReady(file string, timeout time.Duration) error {
	ca, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	client := &http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}},
	}
	defer client.CloseIdleConnections()
	return wait.Until(timeout, func() error {
		response, err := client.Get(p.Server() + "/readyz")
		if err != nil {
			return fmt.Errorf("ask whether the API is ready: %w", err)
		}
		if err := response.Body.Close(); err != nil {
			return err
		}
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("ask whether the API at %s is ready: %s", p.Server(), response.Status)
		}
		return nil
	})
}
